"""The comparison as one HTML page that needs no network, no script and no other file, as Markdown, and as a CSV table.

The table has a line per cell, and one for each bug and run.

Invariants:
- Text of a record reaches both only through their escapes. The page's own policy forbids loading and scripts.
- A CI job's summary has a limited size: reasons are printed for the first MOST_LINES cells of a table without a pass.
"""

from __future__ import annotations

from kvcheck.core.base.record import RunRecord, Verdict
from kvcheck.core.base.server_facts import TOKEN, server_of
from kvcheck.core.report.comparison.changes import change_lines
from kvcheck.core.report.comparison.compare import (
    SERVERS,
    Column,
    Comparison,
    ComparisonEntry,
    Row,
    Table,
    counts,
    summary,
)
from kvcheck.core.report.gate.text import MOST_LINES
from kvcheck.core.report.prices import Axis, ratio_axis, ratio_text
from kvcheck.core.report.templates import filled
from kvcheck.core.report.to_csv import csv_text
from kvcheck.core.run.store import writer_of

COLUMNS = (
    *("kind", "bug", "cell", "shows", "engine", "version", "run_id", "verdict", "codes"),
    *("schedules", "words", "orderings", "tokens", "text", "evidence", "notes", "replay"),
)
UNTRIED = ("not exercised", "not tried")


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


def csv_table(comparison: Comparison) -> str:
    rows: list[dict[str, object]] = []
    for table in comparison.tables:
        for group in table.groups:
            for column, verdict in zip(table.columns, group.verdicts, strict=True) if group.title is not None else ():
                rows.append({"kind": "bug", "bug": group.title, **_release(column), "verdict": verdict.value})
            for row in group.rows:
                for column, cell in zip(table.columns, row.cells, strict=True):
                    rows.append({"bug": group.title, **_release(column), **_cell(row, cell)})
    return csv_text(COLUMNS, [[row.get(name) for name in COLUMNS] for row in rows])


def _release(column: Column) -> dict[str, object]:
    return {"engine": column.engine, "version": column.version, "run_id": column.run_id}


def _cell(row: Row, cell: ComparisonEntry) -> dict[str, object]:
    told = {"kind": "cell", "cell": row.id, "shows": row.shows or None, "verdict": cell.name, "replay": cell.replay}
    if cell.result is None:
        return {**told, "text": cell.text}
    evidence = cell.result.evidence
    return {
        **told,
        "codes": " ".join(cell.codes) or None,
        "schedules": cell.result.schedules,
        "words": sum(evidence.words_verified.values()),
        "orderings": evidence.orderings_checked or None,
        "tokens": evidence.observed.get(TOKEN),
        "text": cell.text or None,
        "evidence": cell.evidence,
        "notes": "; ".join(cell.notes) or None,
    }


write = writer_of(render)
write_markdown = writer_of(markdown)
write_csv = writer_of(csv_table)
