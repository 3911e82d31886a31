"""The comparison as one HTML page that needs no network, no script and no other file, and as Markdown.

Invariants:
- Text of a record reaches both only through their escapes. The page's own policy forbids loading and scripts.
- A CI job's summary has a limited size: reasons are printed for the first MOST_LINES cells of a table without a pass.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.record import RunRecord, Verdict
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.report.comparison.changes import change_lines
from kvcheck.core.report.comparison.compare import SERVERS, Comparison, ComparisonEntry, Row, Table, counts, summary
from kvcheck.core.report.gate.text import MOST_LINES
from kvcheck.core.report.prices import Axis, ratio_axis, ratio_text
from kvcheck.core.report.templates import filled
from kvcheck.core.run.store import write_text

UNTRIED = ("not exercised", "not tried")


def write(comparison: Comparison, path: Path) -> None:
    write_text(path, render(comparison))


def write_markdown(comparison: Comparison, path: Path) -> None:
    write_text(path, markdown(comparison))


def render(comparison: Comparison) -> str:
    return _filled("comparison.html.j2", comparison)


def markdown(comparison: Comparison) -> str:
    return _filled("comparison.md.j2", comparison)


def _filled(template: str, comparison: Comparison) -> str:
    return filled(
        template,
        comparison=comparison,
        verdict=comparison.verdict.value,
        summary=summary(comparison),
        changes=comparison.changes,
        change_lines=[] if comparison.changes is None else change_lines(comparison.changes),
        most=MOST_LINES,
        no_pass=_no_pass,
        servers=SERVERS,
        counts=counts,
        axis_of=_axis,
        ratio_text=ratio_text,
        place_of=_place,
        notes_of=lambda record: [line for line in record.warnings if line.startswith(UNTRIED)],
    )


def _no_pass(table: Table) -> list[tuple[Row, ComparisonEntry]]:
    rows = [row for group in table.groups for row in group.rows]
    return [(row, cell) for row in rows for cell in row.cells if cell.verdict is not Verdict.PASS]


def _axis(table: Table) -> Axis:
    return ratio_axis(row.ratio for rows in table.prices.values() for row in rows if row is not None)


def _place(record: RunRecord) -> str:
    engine = record.environment.get("engine")
    facts = engine if isinstance(engine, dict) else server_of(record) or record.environment
    if "address" in facts:
        return str(facts["address"])
    return ", ".join(f"{name} {facts[name]}" for name in ("python", "torch") if name in facts)
