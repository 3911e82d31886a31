"""The cells of a run: a matrix of scenarios by shapes or variants, and a table with a row per cell.

Invariants:
- Colour never carries meaning alone: a sign and a number repeat it.
- A count that was not taken is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.wording import MARKS, WORST_FIRST, conditional_text, coverage_text, evidence_text, why_text

MOST_COLUMNS = 10
LEAST_FILLED = 0.4
"""Smallest share of filled places in a matrix. Below it, each row lists its cells."""
MOST_OPEN = 12
"""Most unfolded rows of cells that no finding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPlace:
    """row: the scenario, with its transport or probe. column: a shape or a variant."""

    row: str
    column: str


def place_of(cell: ScenarioResult, *, is_probe: bool) -> MatrixPlace:
    scenario = cell.id.removesuffix(f"/{cell.shape}")
    if is_probe:
        probe, _, variant = cell.shape.partition(".")
        return MatrixPlace(row=f"{scenario} · {probe}", column=variant)
    shape, slash, transport = cell.shape.partition("/")
    return MatrixPlace(row=f"{scenario} over {transport}" if slash else scenario, column=shape)


def cells_section(record: RunRecord) -> dict[str, object] | None:
    """Return the template's values. A price list shows only cells that did not pass."""
    numbered = [(f"cell:{at}", cell) for at, cell in enumerate(record.scenarios, start=1)]
    told = [each for each in numbered if not record.bench or each[1].verdict is not Verdict.PASS]
    if not told:
        return None
    explained = {finding.cell for finding in record.findings}
    reasons = {anchor for anchor, cell in told if cell.verdict is not Verdict.PASS and cell.id not in explained}
    ordered = sorted(told, key=lambda each: (each[0] not in reasons, WORST_FIRST.index(each[1].verdict)))
    has_matrix = len(told) > 1 and not record.bench
    unfolded = min(len(reasons), MOST_OPEN) if has_matrix else len(ordered)
    rows = [_row(anchor, cell, conditional_text(cell.id, record.findings)) for anchor, cell in ordered]
    return {
        "matrix": _grid(record, told) if has_matrix else None,
        "open": rows[:unfolded],
        "folded": rows[unfolded:],
        "others": counted(len(rows) - unfolded, "other cell" if unfolded else "cell"),
        "has_evidence": any(row["evidence"] for row in rows),
        "has_duration": any(cell.duration_s > 0 for _, cell in told),
    }


def _families(record: RunRecord) -> Mapping[str, str]:
    found = record.plan.get("families")
    return {str(name): str(family) for name, family in found.items()} if isinstance(found, dict) else {}


def _grid(record: RunRecord, cells: Sequence[tuple[str, ScenarioResult]]) -> dict[str, object]:
    """In a wide or sparse matrix each row lists its cells instead of columns."""
    families, is_probe = _families(record), "engine" in record.environment
    places: dict[str, dict[str, list[dict[str, str]]]] = {}
    for anchor, cell in cells:
        place = place_of(cell, is_probe=is_probe)
        places.setdefault(place.row, {}).setdefault(place.column, []).append(
            _entry(anchor, cell, place, conditional_text(cell.id, record.findings))
        )
    columns = [*dict.fromkeys(column for row in places.values() for column in row)]
    kinds = [*dict.fromkeys(families.values())]
    columns.sort(key=lambda column: kinds.index(families[column]) if column in families else len(kinds))
    filled = sum(map(len, places.values())) / (len(places) * len(columns))
    if len(columns) > MOST_COLUMNS or filled < LEAST_FILLED:
        each = {row: [entry for found in by.values() for entry in found] for row, by in places.items()}
        return {"columns": [], "rows": [{"name": row, "cells": [entries]} for row, entries in each.items()]}
    return {
        "columns": [{"name": column, "family": families.get(column, "")} for column in columns],
        "rows": [{"name": row, "cells": [by.get(column, []) for column in columns]} for row, by in places.items()],
    }


def _entry(anchor: str, cell: ScenarioResult, place: MatrixPlace, conditional: str) -> dict[str, str]:
    planned = "" if cell.coverage is None else f"/{cell.coverage.wanted:,}"
    why = ", ".join(part for part in (why_text(cell), conditional) if part)
    return {
        "anchor": anchor,
        "verdict": cell.verdict.value,
        "mark": MARKS[cell.verdict.value],
        "column": place.column,
        "schedules": f"{cell.schedules:,}{planned}{' conditional' if conditional else ''}",
        "title": f"{cell.id}: {cell.verdict.value.upper()}{f', {why}' if why else ''}",
    }


def _row(anchor: str, cell: ScenarioResult, conditional: str) -> dict[str, str]:
    return {
        "anchor": anchor,
        "verdict": cell.verdict.value,
        "id": cell.id,
        "shape": cell.shape,
        "why": "; ".join(part for part in (why_text(cell), conditional) if part),
        "schedules": f"{cell.schedules:,}" + (f" of {cell.coverage.wanted:,}" if cell.coverage is not None else ""),
        "tried": "" if cell.coverage is None or not cell.coverage.tried else coverage_text(cell.coverage),
        "not_tried": "" if cell.coverage is None else ", ".join(cell.coverage.not_tried),
        "evidence": _evidence(cell.evidence),
        "duration": f"{cell.duration_s:.1f} s" if cell.duration_s > 0 else "",
    }


def _evidence(evidence: Evidence) -> str:
    text = evidence_text(evidence, but=("schedules",))
    return text if evidence != Evidence(schedules=evidence.schedules) else ""


def judged_text(record: RunRecord) -> str:
    evidence, planned = record.evidence, [cell.coverage for cell in record.scenarios]
    known = [cell.wanted for cell in planned if cell is not None]
    of = f" of {sum(known):,} planned" if known and len(known) == len(planned) else ""
    words = sum(evidence.words_verified.values())
    parts = [
        counted(len(record.scenarios), "cell"),
        f"{counted(evidence.schedules, 'schedule')}{of}",
        f"{counted(words, 'word')} verified" if words else "",
        f"{counted(evidence.orderings_checked, 'ordering')} checked" if evidence.orderings_checked else "",
    ]
    return ", ".join(part for part in parts if part)
