"""A record's facts about the running server that it judged, and its requirements.

environment["server"] has the facts; the plan's `require` has the least count of each kind of evidence.

Invariants:
- A record comes from a file: no value of these keys raises; a wrong one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcheck.core.base.record import RunRecord, ScenarioResult

OWN_MODEL = "own_model"
"""The fact with the results of an own model's arms, by cell."""
REQUIRED = "require/"
"""Prefix of a requirement row's id; the kind of evidence follows."""

SERVE = "serve"
"""The argument of `kvcheck bench` for prices of running servers."""
THROUGHPUT, FIRST_TOKEN, NEXT_TOKEN = SERVE_CASES = ("serve-throughput", "serve-first-token", "serve-next-token")
"""The cases of such a run."""


def server_of(record: RunRecord) -> Mapping[str, object] | None:
    facts = record.environment.get("server")
    return facts if isinstance(facts, dict) else None


def engine_and_version(server: Mapping[str, object]) -> tuple[str, str | None]:
    engine, version = server.get("engine"), server.get("version")
    return str(engine or "unknown engine"), None if version is None else str(version)


def server_name(server: Mapping[str, object]) -> str:
    engine, version = engine_and_version(server)
    return f"{engine} {version or 'of unknown version'}"


def is_requirement(row: ScenarioResult) -> bool:
    """True for a row that reports whether a requirement was met; it judges no answer."""
    return row.id.startswith(REQUIRED)


def required(record: RunRecord) -> dict[str, int]:
    asked = record.plan.get("require")
    if not isinstance(asked, dict):
        return {}
    return {str(kind): least for kind, least in asked.items() if type(least) is int}


def requirement_rows(record: RunRecord) -> list[str]:
    return [f"{REQUIRED}{kind}" for kind in required(record)]
