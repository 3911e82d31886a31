"""The gate's result on a terminal: its three parts, the gated rows, verdict and exit code.

Invariants:
- The last lines are verdict, reports if there are any, and exit code.
- Problems are printed below the part that they belong to, at most MOST_DETAILS for each part.
"""

from __future__ import annotations

from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, cells, sections, summary_text

MOST_DETAILS = 10
WIDE = 90
"""A cell that is longer than this, as only names from a record are, does not push the others aside."""


def result_lines(result: GateResult) -> list[str]:
    """All but the last lines."""
    lines: list[str] = []
    for name, text, details in sections(result):
        lines.append(f" {name:<10} {text}")
        lines += [f"            {detail}" for detail in details[:MOST_DETAILS]]
        if len(details) > MOST_DETAILS:
            lines.append(f"            and {len(details) - MOST_DETAILS} more; -o json=FILE has them all")
    if result.rows:
        lines += ["", *_table([HEADINGS, *(cells(row) for row in result.rows)])]
    return [*lines, "", f" {result.verdict}  {summary_text(result)}   {result.duration_s:.1f}s"]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column if len(cell) <= WIDE) for column in zip(*rows, strict=True)]
    return [" " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
