"""The page's section on a run against a server: gaps, evidence by scenario, the server's facts.

Invariants:
- A value that the server does not report is "n/a"; 0 is a count that was read.
- A record comes from a file: facts may have any type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvcheck.core.base.record import RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import (
    OBSERVED,
    OWN_MODEL,
    REQUIRED,
    SERVE_CASES,
    TOKEN,
    is_requirement,
    required,
    server_of,
)
from kvcheck.core.report.wording import WORST_FIRST, amount, in_order, why_text

NA = "n/a"
SOURCES = "evidence"
"""The fact with the source of each kind of evidence."""


def server_section(record: RunRecord) -> dict[str, object] | None:
    server = server_of(record)
    if server is None:
        return None
    cells = [row for row in record.scenarios if not is_requirement(row) and row.id not in SERVE_CASES]
    kinds = in_order(kind for row in cells for kind in row.evidence.observed)
    ordered = sorted(cells, key=lambda row: WORST_FIRST.index(row.verdict))
    return {
        "never": [_never(record, row) for row in record.scenarios if row.verdict is Verdict.UNKNOWN],
        "met": [_met(record, row) for row in record.scenarios if is_requirement(row) and row.verdict is Verdict.PASS],
        "kinds": [{"name": kind, "unit": OBSERVED[kind].unit if kind in OBSERVED else ""} for kind in kinds],
        "rows": [_row(row, kinds, is_whole=bool(record.bench)) for row in ordered],
        "total": [_count(record.evidence.observed, kind) for kind in (TOKEN, *kinds)] if len(cells) > 1 else [],
        "requests": f"{record.evidence.requests:,}",
        "rounds": f"{record.evidence.schedules:,}",
        "arms": _arms(server),
        "recitals": _recitals(server),
        "facts": _facts(server),
    }


def _never(record: RunRecord, row: ScenarioResult) -> dict[str, str]:
    if not is_requirement(row):
        return {"asked": row.id, "seen": "not judged", "why": row.reason or why_text(row) or "no reason was recorded"}
    kind = row.id.removeprefix(REQUIRED)
    least = required(record).get(kind)
    seen = record.evidence.observed.get(kind)
    return {
        "asked": f"--require {kind}" + ("" if least is None else f"={least}"),
        "seen": f"{NA}: the server does not say" if seen is None else f"{amount(kind, seen)} seen",
        "why": row.reason or "no reason was recorded",
    }


def _met(record: RunRecord, row: ScenarioResult) -> str:
    kind = row.id.removeprefix(REQUIRED)
    seen = record.evidence.observed.get(kind)
    least = required(record).get(kind, NA)
    return f"--require {kind}={least}: {NA if seen is None else amount(kind, seen)}"


def _row(row: ScenarioResult, kinds: list[str], *, is_whole: bool) -> dict[str, object]:
    """is_whole: keep the part of the id that names one of two servers or loads."""
    return {
        "verdict": row.verdict.value,
        "id": row.id if is_whole else row.id.removesuffix(f"/{row.shape}"),
        "why": "" if row.verdict is Verdict.UNKNOWN else why_text(row),  # the page begins with those reasons
        "rounds": f"{row.schedules:,}" + ("" if row.coverage is None else f" of {row.coverage.wanted:,}"),
        "requests": f"{row.evidence.requests:,}",
        "tokens": _count(row.evidence.observed, TOKEN),
        "counts": [
            {"name": kind, "value": _count(row.evidence.observed, kind), "is_none": not row.evidence.observed.get(kind)}
            for kind in kinds
        ],
        "duration": f"{row.duration_s:.1f} s",
    }


def _count(observed: Mapping[str, int], kind: str) -> str:
    return f"{observed[kind]:,}" if kind in observed else NA


ARM_COLUMNS = ("requests", "tokens", "cached", "compared", "other", "flips")
"""Counts of an arm of a model of the user's own, beside its largest deviation."""


def _arms(server: Mapping[str, object]) -> list[dict[str, object]]:
    """A row per arm and cell: requests sent, cache hits, largest deviation from the cold reference."""
    rows: list[dict[str, object]] = []
    for cell, own in _own_model(server):
        arms = own.get("arms")
        for arm in arms if isinstance(arms, list) else []:
            if isinstance(arm, dict):
                largest = arm.get("largest")
                is_known = isinstance(largest, int | float) and not isinstance(largest, bool)
                rows.append(
                    {
                        "cell": cell.rpartition("/")[0],
                        "arm": str(arm.get("arm")),
                        "counts": [_whole(arm.get(name)) for name in ARM_COLUMNS],
                        "largest": f"{largest:.3g}" if is_known else NA,
                    }
                )
    return rows


def _recitals(server: Mapping[str, object]) -> list[str]:
    lines = []
    for cell, own in _own_model(server):
        chance = own.get("chance")
        by_chance = f", crosstalk by chance at most {chance:.0e}" if isinstance(chance, float) else ""
        recited, asked = (_whole(own.get(name)) for name in ("recited", "asked"))
        lines.append(f"{cell.rpartition('/')[0]}: {recited} of {asked} cold answers recite their code{by_chance}")
    return lines


def _own_model(server: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    cells = server.get(OWN_MODEL)
    return [(str(cell), own) for cell, own in cells.items() if isinstance(own, dict)] if isinstance(cells, dict) else []


def _whole(value: object) -> str:
    return f"{value:,}" if type(value) is int else NA


def _facts(server: Mapping[str, object]) -> list[dict[str, str]]:
    sources = server.get(SOURCES)
    read = sources if isinstance(sources, dict) else {}
    plain = [
        {"label": str(name), "value": _plain(value)}
        for name, value in server.items()
        if value is not read and name != OWN_MODEL
    ]
    return plain + [{"label": f"{kind} was read from", "value": _plain(read[kind])} for kind in in_order(read)]


def _plain(value: object) -> str:
    if value is None or value == {}:
        return NA
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
