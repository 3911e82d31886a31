"""`python -m tools.mutation [FILE...]`: edit the cache in many small ways, and judge each edit by a default run.

Invariants:
- Everything the user named is checked before anything runs. The source is never written to.
- A result is kept and printed as soon as it is known; the same command goes on where it was cut short.
- It exits 0 once all edits are judged, also where some survived; 2 for bad usage, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: no thread runs when a process is forked

from kvcheck.commands.terminal import complain, say, warn
from kvcheck.core.base.errors import KvcheckError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.scratch import sweep
from kvcheck.core.run.store import make_folder
from tools.mutation.campaign import Judge, Subject, subject_of
from tools.mutation.edits import Edit, all_edits, chosen_files, read_sources, sampled
from tools.mutation.equivalent import LEFT, explained, reasons_for
from tools.mutation.forks import Forks
from tools.mutation.handwritten import HandEdit, hand_subject, read_hand_edits
from tools.mutation.operators import OPERATORS
from tools.mutation.reach import Reach
from tools.mutation.results import RESULTS_FILE, SURVIVED, Campaign, Result, ResultFile, read_results
from tools.mutation.survey import Survey, cells_of, code_of
from tools.mutation.table import PAGE_FILE, summary_lines, write_tables

TRACED = 6
"""Schedules of each cell that are traced: the portfolio's first six differ in order and settings."""
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    try:
        return _run(options)
    except KvcheckError as error:
        complain(str(error))
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    operators = "\n".join(f"  {name:<18}{row.about}" for name, row in OPERATORS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation",
        description="Edit the cache in many small ways, one edit at a time, and list those that a default run finds.",
        epilog=f"operators:\n{operators}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="file or folder below kvcheck/core/cache, such as hicache; else all")
    add("--sample", type=_count, help="edits to judge, spread over files and operators")
    add("--operator", action="append", choices=[*OPERATORS], metavar="NAME", help="only its edits; repeatable")
    add("--scenario", action="append", default=[], metavar="NAME", help="only cells of this scenario; repeatable")
    add("--shape", action="append", default=[], metavar="NAME", help="only cells of this shape; repeatable")
    add("--cpu", type=_seconds, default=10.0, help="CPU seconds of schedules for each edit (10)")
    add("--schedules", type=_count, default=24, help="schedules of each cell, at most (24)")
    add("--seed", type=int, help="of the sample and of the schedules (1, or that of --again)")
    add("--jobs", type=_count, default=len(os.sched_getaffinity(0)), help="processes (one for each core)")
    add("--again", type=Path, metavar="DIR", help="judge the edits of an earlier campaign once more")
    add("--survivors", action="store_true", help="with --again: only those that survived, or lacked evidence alone")
    add("--edits", type=Path, metavar="FILE", help="judge the hand-written edits of a JSON file instead")
    add(
        "--out", type=Path, default=Path("build/mutation"), help="folder of the results, which a later run goes on with"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    return float(_count(text))


def _run(options: argparse.Namespace) -> int:
    if options.survivors and options.again is None:
        raise UsageError("--survivors: expected --again beside it, the campaign whose survivors are judged")
    if options.edits and (options.files or options.operator or options.sample or options.again):
        raise UsageError("--edits judges the edits of its file; expected no files, --operator, --sample or --again")
    out: Path = options.out
    if options.again and options.again.resolve() in (out.resolve(), (out / RESULTS_FILE).resolve()):
        raise UsageError(f"--again {options.again}: expected another folder in --out, so that both results are kept")
    earlier = None if options.again is None else read_results(options.again)
    seed = options.seed if options.seed is not None else earlier[0].seed if earlier is not None else 1
    chosen = _chosen(options, seed, None if earlier is None else earlier[1])
    cells = cells_of(seed, options.scenario, options.shape)
    make_folder(out)
    names = " ".join((*options.scenario, *options.shape))
    campaign = Campaign(code=code_of(), seed=seed, schedules=options.schedules, cpu_s=options.cpu, cells=names)
    kept = ResultFile(out)
    known = kept.open(campaign)
    before = len(set(chosen.ids) & set(known))
    say(f"tools.mutation  seed {seed}  {counted(len(chosen.ids), 'edit')}, {before} judged before  {out}")
    survey = Survey(out / "survey", cells, code=campaign.code, schedules=options.schedules, traced=TRACED)
    code = 0
    try:
        if before < len(chosen.ids):
            _judge(chosen, survey, kept, known, campaign, Forks(options.jobs))
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept; next: the same command, which goes on with it")
        code = INTERRUPTED
    sweep()  # stores of schedules that were cut short
    results = [explained(known[name], chosen.equivalent, chosen.left) for name in chosen.ids if name in known]
    write_tables(out, campaign, results)
    for line in ("", *summary_lines(results)):
        say(line)
    for each in results:
        if each.outcome == "unclear":
            warn(f"{each.id}: {each.note}; next: kvcheck replay {each.line}")
    say(f" report {out / PAGE_FILE}")
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Generated edits by id, or bugs by name. earlier: results of --again. equivalent, left: reasons by id."""

    edits: Mapping[str, Edit] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    bugs: Mapping[str, HandEdit] = field(default_factory=dict)
    earlier: Mapping[str, Result] = field(default_factory=dict)
    equivalent: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        return [*self.edits, *self.bugs]

    def subjects(self, known: Collection[str], reach: Reach) -> Iterator[Subject]:
        for bug in self.bugs.values():
            if bug.name not in known:
                yield hand_subject(bug, reach)
        for edit in self.edits.values():
            if edit.id in known:
                continue
            before = self.earlier.get(edit.id)
            line = before.line if before is not None and before.is_kill else ""
            subject = subject_of(edit, self.sources[edit.file], reach, line)
            if edit.id in self.equivalent:
                result = replace(subject.result, outcome="equivalent", reason=self.equivalent[edit.id])
                subject = replace(subject, result=result, reached={})
            yield subject


def _chosen(options: argparse.Namespace, seed: int, earlier: Mapping[str, Result] | None) -> _Chosen:
    if options.edits:
        return _Chosen(bugs={each.name: each for each in read_hand_edits(options.edits)})
    sources = read_sources()
    files = [*sources] if earlier is not None and not options.files else chosen_files([*sources], options.files)
    if earlier is not None:
        wanted = {name: each for name, each in earlier.items() if not options.survivors or each.outcome in SURVIVED}
        files = [file for file in files if any(each.file == file for each in wanted.values())]
    every = all_edits(sources, files)
    rows = [edit for file in files for edit in every[file] if not options.operator or edit.operator in options.operator]
    if earlier is not None:
        found = {edit.id for edits in every.values() for edit in edits}
        if gone := sum(name not in found and each.file in files for name, each in wanted.items()):
            warn(f"left out: {counted(gone, 'edit')} of --again that the source of today does not have")
        rows = [edit for edit in rows if edit.id in wanted]
    if not rows:
        raise UsageError("no edit is left to judge: expected other files, operators or an --again with more in it")
    return _Chosen(
        edits={edit.id: edit for edit in sampled(rows, options.sample, seed)},
        sources=sources,
        earlier=earlier or {},
        equivalent=reasons_for(every),
        left=reasons_for(every, LEFT),
    )


def _judge(
    chosen: _Chosen, survey: Survey, kept: ResultFile, known: dict[str, Result], campaign: Campaign, forks: Forks
) -> None:
    for cell in survey.run(forks):
        say(f" surveyed    {cell}")
    judge = Judge(forks, survey, schedules=campaign.schedules, cpu_s=campaign.cpu_s)
    for result in judge.results(chosen.subjects({*known}, judge.reach)):
        kept.add(result)
        known[result.id] = result
        say(_line(result, len(known)))


def _line(result: Result, number: int) -> str:
    by = f"{result.oracle} {result.code}" if result.is_kill else ""
    as_expected = "" if not result.expect or not result.is_kill else "" if result.is_expected else " (not as expected)"
    place = f"{result.file.removeprefix('core/cache/')}:{result.line_number}"
    return (
        f" {number:>5}  {result.outcome:<10} {result.id}  {place:<34} {result.operator:<16} {by:<18}{as_expected}"
        f" {counted(result.schedules, 'schedule')} {result.cpu_s:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
