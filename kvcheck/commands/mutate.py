"""`kvcheck mutate`: single edits of the cache's source, each judged by the schedules of a default run.

Invariants:
- Everything the user named is checked before anything runs.
- A result is kept and printed as soon as it is known; the same command goes on where it was cut short.
- Survivors fail nothing, unless --fail-under states the least share of kills.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.options import check_choice, check_positive
from kvcheck.commands.terminal import complain, say, warn
from kvcheck.core.base.errors import TargetError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.scratch import sweep
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder
from kvcheck.core.stress.mutation.edits import (
    GROUPS,
    Edit,
    chosen_files,
    edits_of,
    group_of,
    identifiers_of,
    package_folder,
    read_sources,
)
from kvcheck.core.stress.mutation.equivalent import LEFT, explained, reasons_for
from kvcheck.core.stress.mutation.results import (
    RESULTS_FILE,
    SURVIVED,
    Campaign,
    Result,
    ResultFile,
    read_results,
)

if TYPE_CHECKING:
    from kvcheck.core.stress.mutation.campaign import Subject
    from kvcheck.core.stress.mutation.handwritten import HandEdit
    from kvcheck.core.stress.mutation.pristine import Pristine
    from kvcheck.core.stress.mutation.reach import Reach

DEFAULT_FOLDER = Path("build/mutation")
DEFAULT_SCHEDULES = 24
DEFAULT_CPU_S = 10.0
TRACED = 6
"""Schedules of each cell that are traced: the portfolio's first six differ in order and settings."""
INTERRUPTED = 130

Files = Annotated[
    list[str] | None, typer.Argument(help="Files or folders below kvcheck/core/cache, such as hicache. Default: all.")
]


def mutate(
    files: Files = None,
    sample: Annotated[int | None, typer.Option(help="Edits to judge, spread over files and operators.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="Only edits of this operator; repeatable.")] = None,
    group: Annotated[
        str, typer.Option(help="product, processes (ranks as processes), instrument (backends of a test) or all.")
    ] = "product",
    scenario: Annotated[list[str] | None, typer.Option(help="Only cells of this scenario; repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only cells of this shape; repeatable.")] = None,
    cpu: Annotated[float, typer.Option(help="CPU seconds of schedules for each edit.")] = DEFAULT_CPU_S,
    schedules: Annotated[int, typer.Option(help="Schedules of each cell, at most.")] = DEFAULT_SCHEDULES,
    seed: Annotated[int | None, typer.Option(help="Integer seed. Default: 1, or that of --again.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: one for each core.")] = None,
    again: Annotated[
        Path | None, typer.Option(metavar="DIR|FILE", help="Judge the edits of an earlier campaign once more.")
    ] = None,
    survivors: Annotated[
        bool, typer.Option(help="With --again: only those that survived, or lacked evidence alone.")
    ] = False,
    edits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judge the hand-written edits of a JSON file instead.")
    ] = None,
    fail_under: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Exit 1 if a smaller share is killed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results, which a later run goes on with.")] = DEFAULT_FOLDER,
) -> int:
    """Judge edits and write the tables."""
    _check(sample, cpu, schedules, jobs, survivors=survivors, again=again, edits=edits, group=group, share=fail_under)
    if edits is not None and (files or operator or sample is not None or again is not None):
        raise UsageError("--edits judges the edits of its file; expected no files, --operator, --sample or --again")
    folder = package_folder()
    earlier = None if again is None else read_results(again)
    chosen_seed = seed if seed is not None else earlier[0].seed if earlier is not None else 1
    task = _Task(
        folder=folder,
        sources=read_sources(folder),
        seed=chosen_seed,
        named=tuple(files or ()),
        operators=tuple(operator or ()),
        group=group,
        sample=sample,
        earlier=_earlier(earlier, survivors=survivors),
    )
    chosen = task.choose() if edits is None else _Chosen(bugs=_bugs(edits, folder))
    make_folder(out)
    if again is not None and again.resolve() in (out.resolve(), (out / RESULTS_FILE).resolve()):
        raise UsageError(f"--again {again}: expected another folder in --out, so that both results are kept")
    from kvcheck.core.stress.mutation.pristine import Pristine, cells_of, code_of

    cells = cells_of(chosen_seed, scenario or (), shape or ())
    names = " ".join((*(scenario or ()), *(shape or ())))
    campaign = Campaign(code=code_of(folder), seed=chosen_seed, schedules=schedules, cpu_s=cpu, cells=names)
    kept = ResultFile(out)
    known = kept.open(campaign)
    before = len(set(chosen.ids) & set(known))
    say(f"kvcheck mutate  seed {chosen_seed}  {counted(len(chosen.ids), 'edit')}, {before} judged before  {out}")
    pristine = Pristine(out / "pristine", cells, code=campaign.code, schedules=schedules, traced=TRACED)
    interrupted = False
    try:
        _run(task, chosen, pristine, kept, known, campaign, jobs or Session.cpus())
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept; next: the same command, which goes on with it")
        interrupted = True
    sweep()  # stores of schedules that were cut short
    results = [explained(known[name], chosen.reasons, chosen.left) for name in chosen.ids if name in known]
    return _close(out, campaign, results, fail_under, interrupted=interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the options ask for. earlier: results of --again, by id; None without it."""

    folder: Path
    sources: Mapping[str, str]
    seed: int
    named: tuple[str, ...]
    operators: tuple[str, ...]
    group: str
    sample: int | None
    earlier: Mapping[str, Result] | None

    def choose(self) -> _Chosen:
        """The edits to judge. Raises UsageError."""
        from kvcheck.core.stress.mutation.campaign import sampled

        _check_operators(self.operators)
        names = identifiers_of([*self.sources.values()])
        files = [
            file
            for file in chosen_files([*self.sources], self.named)
            if self.group in ("all", group_of(file)) and (self.earlier is None or file in self.earlier_files)
        ]
        every = {file: edits_of(file, self.sources[file], names) for file in files}
        chosen = [edit for rows in every.values() for edit in rows if self._is_wanted(edit)]
        if self.earlier is not None:
            found = {edit.id for rows in every.values() for edit in rows}
            gone = sum(each.id not in found and each.file in files for each in self.earlier.values())
            if gone:
                warn(f"left out: {counted(gone, 'edit')} of --again that the source of today does not have")
        if not chosen:
            raise UsageError("no edit is left to judge: expected other files, operators or an --again with more in it")
        edits = {edit.id: edit for edit in sampled(chosen, self.sample, self.seed)}
        return _Chosen(edits=edits, reasons=reasons_for(every), left=reasons_for(every, LEFT))

    @property
    def earlier_files(self) -> set[str]:
        """The files of the results of --again."""
        return {each.file for each in (self.earlier or {}).values()}

    def _is_wanted(self, edit: Edit) -> bool:
        is_of_kind = not self.operators or edit.operator in self.operators
        return is_of_kind and (self.earlier is None or edit.id in self.earlier)

    def subjects(self, chosen: _Chosen, known: Collection[str], reach: Reach) -> Iterator[Subject]:
        """What is not known yet and has to be judged, once the cells have been surveyed."""
        from kvcheck.core.stress.mutation.campaign import subject_of
        from kvcheck.core.stress.mutation.handwritten import hand_subject

        for bug in chosen.bugs.values():
            if bug.name not in known:
                yield hand_subject(bug, reach)
        for edit in chosen.edits.values():
            if edit.id in known:
                continue
            before = None if self.earlier is None else self.earlier.get(edit.id)
            line = before.line if before is not None and before.is_kill else ""
            subject = subject_of(edit, self.sources[edit.file], reach, line)
            if edit.id in chosen.reasons:
                result = replace(subject.result, outcome="equivalent", reason=chosen.reasons[edit.id])
                subject = replace(subject, result=result, reached={})
            yield subject


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Generated edits by id, or bugs by name. reasons: why edits are equivalent, left: why nothing finds them."""

    edits: Mapping[str, Edit] = field(default_factory=dict)
    bugs: Mapping[str, HandEdit] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        """Ids and names."""
        return [*self.edits, *self.bugs]


def _run(
    task: _Task,
    chosen: _Chosen,
    pristine: Pristine,
    kept: ResultFile,
    known: dict[str, Result],
    campaign: Campaign,
    jobs: int,
) -> None:
    """Survey the cells, then judge what is not known yet; `known` gets each result."""
    from kvcheck.core.stress.mutation.campaign import Judge
    from kvcheck.core.stress.mutation.pool import ServerPool

    if not set(chosen.ids) - set(known):
        return
    with ServerPool(jobs) as pool:
        for cell in pristine.survey(pool):
            say(f" surveyed    {cell}")
        judge = Judge(pool, pristine, schedules=campaign.schedules, cpu_s=campaign.cpu_s)
        for result in judge.results([*task.subjects(chosen, known, pristine.reach())]):
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


def _close(out: Path, campaign: Campaign, results: Sequence[Result], least: float | None, *, interrupted: bool) -> int:
    """Write the tables and print the last lines; the exit code."""
    from kvcheck.core.stress.mutation.table import PAGE_FILE, share_of, summary_lines, write_tables

    write_tables(out, campaign, results)
    say()
    for line in summary_lines(results):
        say(line)
    for each in results:
        if each.outcome == "unclear":
            warn(f"{each.id}: {each.note}; next: kvcheck replay {each.line}")
    share = share_of(results)
    code = INTERRUPTED if interrupted else 0
    if least is not None and not interrupted and (share is None or 100 * share < least):
        complain(f"--fail-under {least:g}: {'nothing was judged' if share is None else f'{100 * share:.1f} % killed'}")
        code = TargetError.exit_code
    say(f" report {out / PAGE_FILE}")
    say(f" exit {code}")
    return code


def _check(
    sample: int | None,
    cpu: float,
    schedules: int,
    jobs: int | None,
    *,
    survivors: bool,
    again: Path | None,
    edits: Path | None,
    group: str,
    share: float | None,
) -> None:
    for name, value in (("--sample", sample), ("--cpu", cpu), ("--schedules", schedules), ("--jobs", jobs)):
        check_positive(name, value)
    if survivors and again is None:
        raise UsageError("--survivors: expected --again beside it, the campaign whose survivors are judged")
    check_choice("--group", group, (*GROUPS, "all"))
    if share is not None and not 0 <= share <= 100:
        raise UsageError(f"--fail-under: expected a percentage from 0 to 100, got {share:g}")


def _check_operators(named: Sequence[str]) -> None:
    from kvcheck.core.stress.mutation.operators import OPERATORS

    for name in named:
        if name not in OPERATORS:
            raise UsageError(f"--operator: expected one of {', '.join(OPERATORS)}, got {name!r}")


def _earlier(found: tuple[Campaign, dict[str, Result]] | None, *, survivors: bool) -> dict[str, Result] | None:
    """Results of --again."""
    if found is None:
        return None
    return {name: each for name, each in found[1].items() if not survivors or each.outcome in SURVIVED}


def _bugs(path: Path, folder: Path) -> dict[str, HandEdit]:
    from kvcheck.core.stress.mutation.handwritten import read_hand_edits

    return {each.name: each for each in read_hand_edits(path, folder)}
