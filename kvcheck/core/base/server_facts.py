"""What a record says of the running server that it judged: facts, requirements and the rows of both.

A run against a server has environment["server"], with `engine`, `version` and `address` among its facts; its plan
has `require`: how much of which kind of evidence was asked for.

Invariants:
- A record comes from a file: whatever these keys hold, they are read or left out, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcheck.core.base.record import RunRecord, ScenarioResult

OWN_MODEL = "own_model"
"""The fact that says, by cell, what the arms of a user's own model came to."""
REQUIRED = "require/"
"""How the id of a requirement's row begins; the kind of evidence follows."""


def server_of(record: RunRecord) -> Mapping[str, object] | None:
    """Facts about the server; None for a run without one."""
    facts = record.environment.get("server")
    return facts if isinstance(facts, dict) else None


def engine_and_version(server: Mapping[str, object]) -> tuple[str, str | None]:
    """The engine's name, and its version if the server says it."""
    engine, version = server.get("engine"), server.get("version")
    return str(engine or "unknown engine"), None if version is None else str(version)


def server_name(server: Mapping[str, object]) -> str:
    """Engine and version."""
    engine, version = engine_and_version(server)
    return f"{engine} {version or 'of unknown version'}"


def is_requirement(row: ScenarioResult) -> bool:
    """True for a row that says whether a requirement was met; it judges no answer itself."""
    return row.id.startswith(REQUIRED)


def required(record: RunRecord) -> dict[str, int]:
    """Kind of evidence -> the least count that the run asked for."""
    asked = record.plan.get("require")
    if not isinstance(asked, dict):
        return {}
    return {str(kind): least for kind, least in asked.items() if type(least) is int}


def requirement_rows(record: RunRecord) -> list[str]:
    """Ids of the rows that say whether the requirements were met."""
    return [f"{REQUIRED}{kind}" for kind in required(record)]
