"""A record's facts about the running server that it judged, and its requirements.

environment["server"] has the facts; the plan's `require` has the least count of each kind of evidence.

Invariants:
- A record comes from a file: no value of these keys raises; a wrong one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.base.record import RunRecord, ScenarioResult

TOKEN = "token"
OWN_MODEL = "own_model"
"""The fact with the results of an own model's arms, by cell."""
REQUIRED = "require/"
"""Prefix of a requirement row's id; the kind of evidence follows."""
SERVE = "serve"
"""The argument of `kvcheck bench` for prices of running servers."""
THROUGHPUT, FIRST_TOKEN, NEXT_TOKEN = SERVE_CASES = ("serve-throughput", "serve-first-token", "serve-next-token")


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    unit: str
    meaning: str


KINDS: Mapping[str, EvidenceKind] = {
    "hit": EvidenceKind("requests", "judged requests, part of whose prompt came from the prefix cache"),
    "hit-token": EvidenceKind("tokens", "prompt tokens of judged requests that came from the prefix cache"),
    "host-hit": EvidenceKind("tokens", "prompt tokens that were found in the host tier"),
    "storage-hit": EvidenceKind("tokens", "prompt tokens that were found in the storage tier"),
    "evict": EvidenceKind("tokens", "tokens that left the device tier of the prefix cache"),
    "lost-prefix": EvidenceKind(
        "requests", "requests whose prefix had been computed and was not in the cache any more"
    ),
    "retract": EvidenceKind("retractions", "requests that were retracted or preempted, counted each time"),
    "backup": EvidenceKind("tokens", "tokens that were copied from the device to the host tier"),
    "load-back": EvidenceKind("tokens", "tokens that were copied from the host tier back to the device"),
    "transfer": EvidenceKind("requests", "judged requests whose cache went from a prefill server to a decode server"),
    "abort": EvidenceKind("requests", "requests that were aborted while they ran"),
    "overtake": EvidenceKind(
        "requests", "requests of high priority that finished before an earlier one of low priority"
    ),
}


OBSERVED: Mapping[str, EvidenceKind] = {TOKEN: EvidenceKind("tokens", "tokens of answers that were judged"), **KINDS}
"""All counts of a server in a record; without judged tokens no other counts."""


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
    return row.id.startswith(REQUIRED)


def required(record: RunRecord) -> dict[str, int]:
    asked = record.plan.get("require")
    if not isinstance(asked, dict):
        return {}
    return {str(kind): least for kind, least in asked.items() if type(least) is int}


def requirement_rows(record: RunRecord) -> list[str]:
    return [f"{REQUIRED}{kind}" for kind in required(record)]
