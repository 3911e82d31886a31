"""`kvcheck show`: the story of a finding, as a timeline, a history and the words of the row, or as a trace.

Invariants:
- It is made from the record alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.options import DEFAULT_OUT, Format, StoredIn
from kvcheck.commands.report import loaded, parse_outputs
from kvcheck.commands.terminal import columns, complain, print_json, say
from kvcheck.core.base.cells import is_of_server
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding, RunRecord, read_record, to_plain
from kvcheck.core.base.story import Story
from kvcheck.core.report import STORY_WRITERS
from kvcheck.core.report.story_text import story_lines, why_no_story
from kvcheck.core.report.wording import FINDING, PROOF, SMALL, replay_line, shorter, small_line
from kvcheck.core.run.store import RunStore, check_writable, find_run, is_stored

MAX_DIGITS = 6
"""Digits of a finding's number; a longer number is the beginning of a run's id."""


def show(
    run: Annotated[
        str | None,
        typer.Argument(help="A finding as RUN#N or run.json#N, or a run. Default: the newest with findings."),
    ] = None,
    finding: Annotated[
        str | None, typer.Argument(help="Number or id of a finding of that run. Default: the first one with a story.")
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="perfetto=PATH", help="Also write a trace for ui.perfetto.dev."),
    ] = None,
    format_name: Format = "text",
    out: StoredIn = DEFAULT_OUT,
) -> int:
    outputs = parse_outputs(output, format_name, known=(STORY_WRITERS,))
    path, record, number = _named(run, finding, out)
    found = _finding(record, number)
    cause = next((each for each in record.findings if each.id == found.cause), found)
    if outputs and (why := why_no_story(cause)) is not None:
        raise UsageError(f"-o {outputs[0][0]}: finding {cause.id} has no story: {why}")
    for name, file in outputs:
        if file.resolve() == path.resolve():
            raise UsageError(f"-o {name}={file}: expected another file than the record it is made from")
        check_writable(file)
    if format_name == "json":
        print_json(_plain(found, cause))
    else:
        if cause is not found:
            say(f" finding {found.id} is a symptom of {cause.id}, whose story this is")
        for line in [*story_lines(cause, columns()), "", *_commands(path, record, cause)]:
            say(line)
    for name, file in outputs:
        loaded(STORY_WRITERS, name)(cause, file)
        if format_name == "text":
            say(f" {name} {file}")
    return 0


def _commands(path: Path, record: RunRecord, cause: Finding) -> list[str]:
    small = shorter(small_line(cause), record, cause, SMALL)
    kept = str(path) if is_of_server(cause.schedule) else ""
    again, more = replay_line(record, cause), f"kvcheck explain {cause.code}"
    named = (("record", kept), ("again", again), ("small", small), ("more", more))
    return [f"    {label:<6}  {command}" for label, command in named if command]


def _plain(found: Finding, cause: Finding) -> dict[str, object]:
    """Return the story with the finding that it is of. cause: itself, or the finding that it is a symptom of."""
    story = to_plain(cause.story or Story(about=cause.cell, untold=why_no_story(cause)))
    assert isinstance(story, dict), "a dataclass becomes a dict"
    head = {"finding": found.id, "cause": cause.id, "code": cause.code, "cell": cause.cell, "message": cause.message}
    return {**head, "replay": cause.replay, **story}


def _named(run: str | None, finding: str | None, out: Path) -> tuple[Path, RunRecord, str | None]:
    """Return the record with its file, and the finding's number or id. One word alone may be either, or RUN#N."""
    if run is not None and finding is None and not is_stored(run):
        if named := FINDING.fullmatch(run):
            if (part := named["part"]) is not None:
                what = "a proof" if part == PROOF else "a smaller schedule"
                raise UsageError(f"{run}: {what} has no story of its own; leave {part} out")
            return *_read(find_run(named["run"], out)), named["number"]
        if _is_number(run) and len(run) <= MAX_DIGITS:
            return *_newest(out), run
    return *(_newest(out) if run is None else _read(find_run(run, out))), finding


def _read(path: Path) -> tuple[Path, RunRecord]:
    return path, read_record(path)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _newest(out: Path) -> tuple[Path, RunRecord]:
    """Return the newest run with findings."""
    for path, record in RunStore(out).newest_first(lambda error: complain(f"passed over: {error}")):
        if record.findings:
            return path, record
    raise UsageError(
        f"no run in {out} has findings to show; make one with `kvcheck stress`, or name another folder by --out"
    )


def _finding(record: RunRecord, number: str | None) -> Finding:
    if not record.findings:
        raise UsageError(f"run {record.run_id} has no findings to show; its verdict is {record.verdict.value}")
    if number is None:
        return next((each for each in record.findings if why_no_story(each) is None), record.findings[0])
    wanted = f"{record.run_id}.{int(number)}" if _is_number(number) and len(number) <= MAX_DIGITS else number
    found = next((each for each in record.findings if each.id == wanted), None)
    if found is None:
        count = len(record.findings)
        raise UsageError(
            f"run {record.run_id} has no finding {number[:80]!r}: expected a number from 1 to {count}, or an id"
        )
    return found
