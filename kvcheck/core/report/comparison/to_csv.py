"""The comparison as one CSV table: a line per cell, and one for each bug and run."""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.server_facts import TOKEN
from kvcheck.core.report.comparison.compare import Column, Comparison, ComparisonEntry, Row
from kvcheck.core.report.to_csv import csv_text
from kvcheck.core.run.store import write_text

COLUMNS = (
    *("kind", "bug", "cell", "shows", "engine", "version", "run_id", "verdict", "codes"),
    *("schedules", "words", "orderings", "tokens", "text", "evidence", "notes", "replay"),
)


def write(comparison: Comparison, path: Path) -> None:
    write_text(path, render(comparison))


def render(comparison: Comparison) -> str:
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
