"""The comparison as markdown, for the summary page of a CI job or a page of documentation.

Invariants:
- Text of a record cannot become markup, a link or a new line.
- A summary page has a limited size: reasons are printed for the first MOST_LINES cells of an engine that are no pass.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.comparison.compare import Comparison, Entry, Table, counts, summary
from kvcheck.core.report.gate.to_md import MOST_LINES
from kvcheck.core.report.markdown import escaped, table_line
from kvcheck.core.report.store import write_text

SHOUT = {Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "UNKNOWN", Verdict.PASS: "pass"}


def write(comparison: Comparison, path: Path) -> None:
    """The tables at `path`."""
    write_text(path, render(comparison))


def render(comparison: Comparison) -> str:
    """The text: a table an engine, then every failing or unjudged cell with its replay line."""
    lines = [f"### kvcheck: {comparison.verdict.value.upper()}", "", escaped(summary(comparison))]
    for table in comparison.tables:
        lines += ["", *_table(table)]
    return "\n".join(lines) + "\n"


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


def _short(cell: Entry) -> str:
    name = cell.name if cell.verdict is None else SHOUT[cell.verdict]
    return "; ".join(part for part in (" ".join((name, *cell.codes)), counts(cell)) if part)
