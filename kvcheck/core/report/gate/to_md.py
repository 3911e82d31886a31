"""The gate's result as markdown, for the summary page of a CI job.

Invariants:
- Text of a record cannot become markup, a link or a new line: all that markdown could read so is a character reference.
- A summary page has a limited size: each list shows its first MOST_LINES, then how many more there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvcheck.core.base.nouns import counted
from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, cells, sections, summary_text
from kvcheck.core.report.printable import printable
from kvcheck.core.report.store import write_text

MOST_LINES = 100
MOST_CHARS = 1000
PLAIN = re.compile(r"[^\w .,%()/+–±-]|_|(?<=www)\.")


def write(result: GateResult, path: Path) -> None:
    """The summary at `path`."""
    write_text(path, render(result))


def render(result: GateResult) -> str:
    """The text of the summary."""
    lines = [f"### kvcheck gate: {result.verdict}, exit {result.exit_code}", "", escaped(summary_text(result)), ""]
    for name, text, details in sections(result):
        lines += [f"- **{name}**: {escaped(text)}", *(f"  - detail: {line}" for line in _first(details))]
    if result.rows:
        lines += ["", table_line(HEADINGS), "|" + " --- |" * len(HEADINGS)]
        lines += [table_line(cells(row)) for row in result.rows[:MOST_LINES]]
        if len(result.rows) > MOST_LINES:
            lines += ["", f"{counted(len(result.rows) - MOST_LINES, 'more row')} in the JSON"]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """`text` as markdown that shows just this text, on one line."""
    shown = printable(text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…")
    return PLAIN.sub(lambda found: f"&#{ord(found[0])};", shown)


def _first(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [escaped(line) for line in lines[:MOST_LINES]] + more


def table_line(texts: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(escaped(text) for text in texts) + " |"
