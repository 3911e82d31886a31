"""The comparison as markdown, for the summary page of a CI job or a page of documentation.

Invariants:
- A summary page has a limited size: reasons are printed for the first MOST_LINES cells of a table that did not pass.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.comparison.changes import Changes, ChangeState, line_of
from kvcheck.core.report.comparison.compare import (
    NOT_RUN,
    Comparison,
    ComparisonEntry,
    Table,
    Trend,
    counts,
    price_text,
    summary,
)
from kvcheck.core.report.gate.text import MOST_LINES
from kvcheck.core.report.markdown import escaped, table_line
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
        lines += _trend(table.engine, table.trend) if table.trend is not None else []
    return "\n".join(lines) + "\n"


def _changes(found: Changes) -> list[str]:
    lines = [f"### kvcheck compare: {found.verdict}, exit {found.exit_code}", "", escaped(found.summary), ""]
    lines += [f"- **not comparable**: {escaped(text)}" for text in found.problems]
    for state in ChangeState:
        groups = found.grouped(state)
        for rows in groups[:MOST_LINES]:
            line = f"<br>{escaped(rows[0].replay)}" if rows[0].replay and state is ChangeState.NEW else ""
            lines.append(f"- **{state.value}**: {escaped(line_of(rows))}{line}")
        lines += [f"- and {len(groups) - MOST_LINES} more {state.value}"] if len(groups) > MOST_LINES else []
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
    more = [f"- and {len(told) - MOST_LINES} more"] if len(told) > MOST_LINES else []
    return [*lines, "", *told[:MOST_LINES], *more]


def _trend(engine: str, found: Trend) -> list[str]:
    head = [table_line((f"{engine} over time", *found.starts)), "|" + " --- |" * (1 + len(found.starts))]
    lines = ["", *head, table_line(("run", *(SHOUT[verdict] for verdict in found.verdicts)))]
    if any(found.words):
        lines.append(table_line(("words judged", *(f"{words:,}" for words in found.words))))
    for cell in found.cells:
        lines.append(table_line((cell.id, *(NOT_RUN if each is None else SHOUT[each] for each in cell.verdicts))))
    lines += [table_line((price.id, *map(price_text, price.ratios))) for price in found.prices]
    return lines


def _short(cell: ComparisonEntry) -> str:
    name = cell.name if cell.verdict is None else SHOUT[cell.verdict]
    return "; ".join(part for part in (" ".join((name, *cell.codes)), counts(cell)) if part)
