"""The comparison as markdown, for the summary page of a CI job or a page of documentation.

Invariants:
- A summary page has a limited size: reasons are printed for the first MOST_LINES cells of a table that did not pass.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.comparison.changes import Changes, change_lines
from kvcheck.core.report.comparison.compare import Comparison, ComparisonEntry, Table, counts, summary
from kvcheck.core.report.gate.text import MOST_LINES
from kvcheck.core.report.markdown import escaped, table_line
from kvcheck.core.report.prices import ratio_text
from kvcheck.core.run.store import write_text

SHOUT = {Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "UNKNOWN", Verdict.PASS: "pass"}


def write(comparison: Comparison, path: Path) -> None:
    write_text(path, render(comparison))


def render(comparison: Comparison) -> str:
    lines = [f"### kvcheck: {comparison.verdict.value.upper()}", "", escaped(summary(comparison))]
    if comparison.changes is not None:
        lines = _changes(comparison.changes)
    for table in comparison.tables:
        lines += ["", *_table(table)]
    return "\n".join(lines) + "\n"


def _changes(found: Changes) -> list[str]:
    lines = [f"### kvcheck compare: {found.verdict}, exit {found.exit_code}", "", escaped(found.summary), ""]
    lines += [f"- **not comparable**: {escaped(text)}" for text in found.problems]
    for state, _, rows in change_lines(found):
        lines += [
            f"- **{state.value}**: {escaped(text)}{f'<br>{escaped(replay)}' if replay else ''}"
            for text, replay in rows[:MOST_LINES]
        ]
        lines += [f"- and {len(rows) - MOST_LINES} more {state.value}"] if len(rows) > MOST_LINES else []
    return [*lines, *(f"- note: {escaped(text)}" for text in found.notes)]


def _table(table: Table) -> list[str]:
    lines = [
        table_line((table.engine, *(column.label for column in table.columns))),
        "|" + " --- |" * (1 + len(table.columns)),
    ]
    told = []
    for group in table.groups:
        found = zip(group.verdicts, group.conditional, strict=True)
        bold = [f"**{SHOUT[verdict]}**{', conditional findings' * is_conditional}" for verdict, is_conditional in found]
        if group.title is not None:
            lines.append(f"| **{escaped(group.title)}** | " + " | ".join(bold) + " |")
        for row in group.rows:
            lines.append(table_line((row.id, *(_short(cell) for cell in row.cells))))
            told += [
                f"- {escaped(f'{cell.label}, {row.id}: {cell.text or cell.name}')}<br>{escaped(cell.replay)}"
                for cell in row.cells
                if cell.verdict is not Verdict.PASS
            ]
    lines += [
        table_line((name, *("not measured" if row is None else ratio_text(row.ratio) for row in rows)))
        for name, rows in table.prices.items()
    ]
    more = [f"- and {len(told) - MOST_LINES} more"] if len(told) > MOST_LINES else []
    return [*lines, "", *told[:MOST_LINES], *more]


def _short(cell: ComparisonEntry) -> str:
    name = cell.name if cell.verdict is None else SHOUT[cell.verdict]
    return "; ".join(part for part in (" ".join((name, *cell.codes)), counts(cell)) if part)
