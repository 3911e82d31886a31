"""The comparison as one HTML page that needs no network, no script and no other file.

Invariants:
- Text of a record reaches the page only through autoescape. The page's own policy forbids loading and scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from kvcheck.core.base.record import Verdict
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.report.comparison.changes import Changes, ChangeState, line_of
from kvcheck.core.report.comparison.compare import (
    SERVERS,
    Column,
    Comparison,
    ComparisonEntry,
    Group,
    Trend,
    counts,
    price_text,
    summary,
)
from kvcheck.core.report.price_section import axis_svg, dot_svg, ratio_axis
from kvcheck.core.report.templates import template
from kvcheck.core.report.wording import MARKS, asset, clip, visible
from kvcheck.core.run.store import write_text

MESSAGE_CHARS = 600
UNTRIED = ("not exercised", "not tried")
"""Prefixes of warnings about parts that a run did not try."""


def write(comparison: Comparison, path: Path) -> None:
    write_text(path, render(comparison))


def render(comparison: Comparison) -> str:
    style = asset("page.css")
    return template("comparison.html.j2", visible).render(
        verdict=comparison.verdict.value,
        marks=MARKS,
        style=Markup(style),
        summary=summary(comparison),
        changes=comparison.changes,
        states=[] if comparison.changes is None else [_state(comparison.changes, each) for each in ChangeState],
        tables=[
            {
                "engine": table.engine,
                "heading": "scenario" if table.engine == SERVERS else "bug, and what was tried",
                "columns": table.columns,
                "groups": [_group(group) for group in table.groups],
            }
            for table in comparison.tables
        ],
        trends=[
            {"engine": table.engine, **_trend(table.trend)} for table in comparison.tables if table.trend is not None
        ],
        runs=[_run(column) for column in comparison.columns],
    )


def _state(found: Changes, state: ChangeState) -> dict[str, object]:
    groups = [{"line": line_of(rows), "replay": rows[0].replay} for rows in found.grouped(state)]
    return {"name": state.value, "count": len(found.of(state)), "groups": groups}


def _trend(found: Trend) -> dict[str, object]:
    axis = ratio_axis([ratio for price in found.prices for ratio in price.ratios if ratio is not None])
    return {
        "starts": found.starts,
        "runs": found.run_ids,
        "verdicts": [verdict.value for verdict in found.verdicts],
        "words": [f"{words:,}" for words in found.words] if any(found.words) else [],
        "cells": [
            {"id": cell.id, "verdicts": ["" if each is None else each.value for each in cell.verdicts]}
            for cell in found.cells
        ],
        "axis": axis_svg(axis, ""),
        "prices": [
            {
                "id": price.id,
                "runs": [
                    {
                        "text": price_text(ratio),
                        "dot": "" if ratio is None or floor is None else dot_svg(axis, ratio, floor, ""),
                    }
                    for ratio, floor in zip(price.ratios, price.floors, strict=True)
                ],
            }
            for price in found.prices
        ],
    }


def _group(group: Group) -> dict[str, object]:
    return {
        "title": group.title,
        "verdicts": [verdict.value for verdict in group.verdicts],
        "conditional": group.conditional,
        "rows": [
            {"id": row.id, "shows": row.shows, "cells": [_cell(cell) for cell in row.cells]} for row in group.rows
        ],
    }


def _cell(cell: ComparisonEntry) -> dict[str, object]:
    return {
        "more": "replay" if cell.verdict is Verdict.PASS and not cell.is_conditional else "why, and replay",
        "notes": [clip(note, MESSAGE_CHARS) for note in cell.notes],
        "is_partial": any("not exercised" in note for note in cell.notes),
        "label": cell.label,
        "verdict": cell.name,
        "codes": " ".join(cell.codes),
        "counts": counts(cell),
        "text": clip(cell.text, MESSAGE_CHARS),
        "evidence": cell.evidence,
        "replay": cell.replay,
    }


def _run(column: Column) -> dict[str, object]:
    record = column.record
    engine = record.environment.get("engine")
    facts = engine if isinstance(engine, dict) else server_of(record) or record.environment
    return {
        "label": column.label,
        "verdict": record.verdict.value,
        "run": record.run_id,
        "by": f"kvcheck {record.tool.get('version', '')}, {record.started_at}",
        "on": _place(facts),
        "seed": "n/a" if record.seed is None else str(record.seed),
        "cut": "" if record.complete else "cut short",
        "repro": record.repro,
        "notes": [clip(line, MESSAGE_CHARS) for line in record.warnings if line.startswith(UNTRIED)],
    }


def _place(facts: Mapping[str, object]) -> str:
    """A server's address, or the versions of python and torch."""
    if "address" in facts:
        return str(facts["address"])
    return ", ".join(f"{name} {facts[name]}" for name in ("python", "torch") if name in facts)
