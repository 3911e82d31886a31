"""The page's section on a run against a server: gaps, evidence by scenario, the server's facts.

Invariants:
- A value that the server does not report is "n/a"; 0 is a count that was read.
- A record comes from a file: facts may have any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.base.record import RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import OWN_MODEL, REQUIRED, SERVE_CASES, is_requirement, required, server_of
from kvcheck.core.report.wording import WORST_FIRST, amount, in_order

SOURCES = "evidence"
"""The fact with the source of each kind of evidence."""
ARM_COLUMNS = ("requests", "tokens", "cached", "compared", "other", "flips")
"""Counts of an arm of a model of the user's own, beside its largest deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """never: unknown rows, with the option that asked for each and its count. arms: (cell, arm) of the user's model."""

    never: list[tuple[ScenarioResult, str, str]]
    met: list[str]
    kinds: list[str]
    rows: list[ScenarioResult]
    arms: list[tuple[str, Mapping[str, object]]]
    recitals: list[tuple[str, Mapping[str, object]]]
    facts: dict[str, object]


def server_view(record: RunRecord) -> ServerView | None:
    server = server_of(record)
    if server is None:
        return None
    cells = [row for row in record.scenarios if not is_requirement(row) and row.id not in SERVE_CASES]
    own = _own_model(server)
    sources = server.get(SOURCES)
    read = sources if isinstance(sources, dict) else {}
    facts = {str(name): value for name, value in server.items() if value is not read and name != OWN_MODEL}
    return ServerView(
        never=[(row, *_asked(record, row)) for row in record.scenarios if row.verdict is Verdict.UNKNOWN],
        met=[
            ": ".join(_asked(record, row))
            for row in record.scenarios
            if is_requirement(row) and row.verdict is Verdict.PASS
        ],
        kinds=in_order(kind for row in cells for kind in row.evidence.observed),
        rows=sorted(cells, key=lambda row: WORST_FIRST.index(row.verdict)),
        arms=[(cell, arm) for cell, each in own for arm in _listed(each.get("arms")) if isinstance(arm, dict)],
        recitals=own,
        facts=facts | {f"{kind} was read from": read[kind] for kind in in_order(read)},
    )


def _asked(record: RunRecord, row: ScenarioResult) -> tuple[str, str]:
    """The option that made the row, or its id, and the count that the server reported."""
    if not is_requirement(row):
        return row.id, "not judged"
    kind = row.id.removeprefix(REQUIRED)
    least, seen = required(record).get(kind), record.evidence.observed.get(kind)
    told = "n/a: not reported by the server" if seen is None else f"{amount(kind, seen)} seen"
    return f"--require {kind}" + ("" if least is None else f"={least}"), told


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _own_model(server: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    cells = server.get(OWN_MODEL)
    found = cells.items() if isinstance(cells, dict) else ()
    return [(str(cell).rpartition("/")[0], own) for cell, own in found if isinstance(own, dict)]
