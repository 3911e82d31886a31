"""`kvcheck compare`: changes from an earlier to a later run, as one exit code.

Invariants:
- Exit 1 for something new, 4 if the runs cannot be compared, else 0. Prices do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.options import DEFAULT_OUT, ConditionalFails, Format, StoredIn
from kvcheck.commands.report import check_outputs, loaded, parse_outputs, report_problem
from kvcheck.commands.terminal import columns, print_json, say, warn
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.report import CHANGES_WRITERS, COMPARISON_WRITERS
from kvcheck.core.report.comparison.changes import (
    Change,
    Changes,
    ChangeState,
    beside_text,
    changes,
    head_of,
    replay_of,
    version_of,
)
from kvcheck.core.report.comparison.compare import compare as side_by_side
from kvcheck.core.report.story_text import has_story
from kvcheck.core.report.wording import by_name, hung, labelled, replay_line, wrapped
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
    if not 0 <= least_share <= 1:
        raise UsageError(f"--least-share: expected a share from 0 to 1, got {least_share:g}")
    paths = [find_run(name, out) for name in (run_a, run_b)]
    outputs = parse_outputs(output, format_name, known=(CHANGES_WRITERS, COMPARISON_WRITERS))
    check_outputs(outputs, sources=paths)
    before, after = map(read_record, paths)
    found = changes(before, after, share=least_share, conditional=fail_on_conditional)
    lines = [
        line
        for label, record in (("before", before), ("after", after))
        for line in labelled(label, f"{record.run_id}  {version_of(record)}", columns())
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
    width, known = columns(), {each.replay: each for each in reversed(after.findings) if each.replay}
    named = {replay: replay_line(after, each) for replay, each in known.items()}
    lines = [line for text in found.problems for line in labelled("problem", text, width)]
    lines += [line for text in found.notes for line in labelled("note", text, width)]
    for state in ChangeState:
        groups = found.grouped(state)
        if groups:
            lines += ["", *labelled(state.value, _counts(found, state, len(groups)), width)]
        for rows in groups[:MOST_TOLD]:
            lines += _group(rows, named, width)
        if len(groups) > MOST_TOLD:
            lines += labelled("", f"and {len(groups) - MOST_TOLD} more; -o json=FILE has them all", width)
    lines += ["", *wrapped(f" {found.verdict}  {CONCLUSIONS[found.exit_code]}: {found.summary}", width)]
    new = next((known[row.replay] for row in found.of(ChangeState.NEW) if row.replay in known), None)
    story = None if new is None or not has_story(after, new) else by_name("show", after, new)
    follows = after.repro if new is None else story or f"kvcheck explain {new.code}"
    return [*lines, f" next   {follows}"] if found.exit_code else lines


def _counts(found: Changes, state: ChangeState, groups: int) -> str:
    count = len(found.of(state))
    return str(count) if count == groups else f"{count} changes of {counted(groups, 'cause')}"


def _group(rows: Sequence[Change], named: Mapping[str, str], width: int) -> list[str]:
    """Return the entry of one cause. named: shorter commands."""
    lines = [*hung("    ", head_of(rows), width), *labelled("   what", rows[0].text, width)]
    if beside := beside_text(rows):
        lines += labelled("   beside", beside, width)
    replay = replay_of(rows)
    return lines if replay is None else [*lines, f"    {'again':<8}  {named.get(replay, replay)}"]


CONCLUSIONS = {
    0: "nothing new in the later run",
    1: "the later run has failures that the earlier one lacks",
    4: "no conclusion: the runs do not suffice",
}
