"""`kvcheck compare`: changes from an earlier to a later run, as one exit code.

Invariants:
- Exit 1 for something new, 4 if the runs cannot be compared, else 0. Prices do not count.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.options import DEFAULT_OUT, FORMATS, ConditionalFails, Format, StoredIn, check_choice
from kvcheck.commands.report import check_outputs, loaded, parse_outputs, report_problem
from kvcheck.commands.terminal import columns, print_json, say, warn
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.report import CHANGES_WRITERS, COMPARISON_WRITERS
from kvcheck.core.report.comparison.changes import Changes, change_lines, changes, version_of
from kvcheck.core.report.comparison.compare import compare as side_by_side
from kvcheck.core.report.wording import LABEL, labelled, replay_line, wrapped
from kvcheck.core.run.store import find_run

MOST_TOLD = 20
SHARE = 0.5

Run = Annotated[str, typer.Argument(help="Run id or its unique start, folder, or run.json.")]
LeastShare = Annotated[
    float, typer.Option(help="Share of the earlier run's schedules, words and situations that a passing cell needs.")
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("--output", "-o", metavar="FORMAT=PATH", help="A report: json, md or html; repeatable."),
]


def compare(
    run_a: Annotated[str, typer.Argument(help="The earlier run: id, its unique start, folder, or run.json.")],
    run_b: Annotated[str, typer.Argument(help="The later run.")],
    least_share: LeastShare = SHARE,
    fail_on_conditional: ConditionalFails = False,
    out: StoredIn = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
) -> int:
    check_choice("--format", format_name, FORMATS)
    if not 0 <= least_share <= 1:
        raise UsageError(f"--least-share: expected a share from 0 to 1, got {least_share:g}")
    paths = [find_run(name, out) for name in (run_a, run_b)]
    outputs = parse_outputs(output, format_name, known=(CHANGES_WRITERS, COMPARISON_WRITERS))
    check_outputs(outputs, sources=paths)
    before, after = map(read_record, paths)
    found = changes(before, after, share=least_share, conditional=fail_on_conditional)
    lines = [
        f" before       {before.run_id}  {version_of(before)}",
        f" after        {after.run_id}  {version_of(after)}",
    ]
    lines += _lines(found, after)
    for format_name_of, path in outputs:
        problem = _report(found, before, after, format_name_of, path)
        if problem is None:
            lines.append(f" report {path}")
        else:
            warn(problem)
    if format_name == "json":
        print_json(found.plain())
        return found.exit_code
    for line in [*lines, f" exit {found.exit_code}"]:
        say(line)
    return found.exit_code


def _report(found: Changes, before: RunRecord, after: RunRecord, format_name: str, path: Path) -> str | None:
    """Write the changes alone, or above both runs side by side. Return the reason if it fails."""
    if format_name in CHANGES_WRITERS.names():
        return report_problem(CHANGES_WRITERS, format_name, found, path)
    try:
        both = replace(side_by_side([before, after]), changes=found)
    except UsageError as error:
        return f"no {format_name} report at {path}: {error}"
    loaded(COMPARISON_WRITERS, format_name)
    return report_problem(COMPARISON_WRITERS, format_name, both, path)


def _lines(found: Changes, after: RunRecord) -> list[str]:
    width, named = columns(), {each.replay: replay_line(after, each) for each in after.findings}
    lines = [line for text in found.problems for line in labelled("problem", text, width)]
    for state, count, rows in change_lines(found):
        lines += labelled(state.value, str(count), width)
        for text, replay in rows[:MOST_TOLD]:
            lines += labelled("", text, width)
            lines += [f"{'':{LABEL + 1}}again: {named.get(replay, replay)}"] if replay else []
        if len(rows) > MOST_TOLD:
            lines += labelled("", f"and {len(rows) - MOST_TOLD} more; -o json=FILE has them all", width)
    lines += [line for text in found.notes for line in labelled("note", text, width)]
    return [*lines, "", *wrapped(f" {found.verdict}  {CONCLUSIONS[found.exit_code]}: {found.summary}", width)]


CONCLUSIONS = {
    0: "nothing new in the later run",
    1: "the later run has failures that the earlier one lacks",
    4: "no conclusion: the runs do not suffice",
}
