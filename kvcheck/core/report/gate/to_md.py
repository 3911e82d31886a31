"""The gate's result as markdown, for the summary page of a CI job: an entry for each cause, with its replay line.

Invariants:
- A summary page has a limited size: each list shows its first MOST_LINES, then the number of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvcheck.core.base.nouns import counted
from kvcheck.core.report.ci.trouble import Kind, Trouble
from kvcheck.core.report.ci.trouble_lines import trouble_lines
from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.gate.text import HEADINGS, cells, problem_text, sections, summary_text
from kvcheck.core.report.markdown import escaped, table_line
from kvcheck.core.run.store import write_text

MOST_LINES = 100


def write(result: GateResult, path: Path) -> None:
    write_text(path, render(result))


def render(result: GateResult) -> str:
    written_out = {"integrity": result.integrity, "conditional": result.conditional}
    lines = [f"### kvcheck gate: {result.verdict}, exit {result.exit_code}", "", escaped(summary_text(result)), ""]
    for name, text, details in sections(result):
        if name in written_out:  # its causes have an entry each below
            details = tuple(problem_text(each) for each in written_out[name] if each.trouble is None)
        lines += [f"- **{name}**: {escaped(text)}", *(f"  - detail: {line}" for line in _first(details))]
    if told := _causes(result):
        lines += ["", *trouble_lines([trouble for trouble, _ in told], [run_id for _, run_id in told])]
    if result.rows:
        lines += ["", table_line(HEADINGS), "|" + " --- |" * len(HEADINGS)]
        lines += [table_line(cells(row)) for row in result.rows[:MOST_LINES]]
        if len(result.rows) > MOST_LINES:
            lines += ["", f"{counted(len(result.rows) - MOST_LINES, 'more row')} in the JSON"]
    return "\n".join(lines) + "\n"


def _causes(result: GateResult) -> list[tuple[Trouble, str | None]]:
    parts = [(Kind.FINDING, result.integrity)]
    parts += [] if result.fail_on_conditional else [(Kind.CONDITIONAL, result.conditional)]
    return [
        (replace(each.trouble, kind=kind), each.run_id)
        for kind, part in parts
        for each in part
        if each.trouble is not None
    ]


def _first(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [escaped(line) for line in lines[:MOST_LINES]] + more
