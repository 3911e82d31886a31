"""`kvcheck campaign`: workloads of many seeds, each explored within K answers, for as long as one likes.

Invariants:
- Everything the user named is checked before anything runs.
- Each batch that has ended is on disk before the next one is counted, and is not run again with --resume.
- Lines that failed before run first. A finding ends nothing, but a hang or a crash its batch.
- The exit code is the record's, less what --baseline knows: 0 pass, 1 finding, 4 not enough evidence, 130 interrupted.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands import worker
from kvcheck.commands.campaign_known import KnownFindings
from kvcheck.commands.campaign_lines import LINES, FailingLines
from kvcheck.commands.campaign_record import LIMITS, goes_on_from, session_of, tell_rows, update
from kvcheck.commands.closing import close
from kvcheck.commands.options import (
    DEFAULT_OUT,
    FORMATS,
    Format,
    Out,
    Outputs,
    Reports,
    check_choice,
    check_plan,
    check_positive,
)
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.stress_options import Names, Requests, Shapes
from kvcheck.commands.targets import target_of, unfound_mutant
from kvcheck.commands.terminal import complain, passing
from kvcheck.core.base.errors import InternalError, KvcheckError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder

if TYPE_CHECKING:
    from kvcheck.core.base.record import RunRecord
    from kvcheck.core.stress.campaign.batches import Batch, CampaignPlan
    from kvcheck.core.stress.campaign.crew import Crew
    from kvcheck.core.stress.campaign.tally import Tally

SAVED_EVERY_S = 5.0
"""Seconds of wall time between two saves of run.json. What has ended in between is in the ledger."""
MOST_NOTES = 40
"""Notes of schedules that the record keeps."""

Workloads = Annotated[
    int | None, typer.Option(help="Workloads of each cell and seed. Default: one of each variant of its settings.")
]
Traces = Annotated[
    int | None, typer.Option(metavar="N", help="Begin no further batch once there are so many distinct host traces.")
]
Lines = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of lines that failed; they run first. Default: OUT/lines.")
]
Baseline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Known findings, see kvcheck baseline; they fail no campaign.")
]


def campaign(
    ctx: typer.Context,
    scenarios: Names = None,
    shape: Shapes = None,
    seeds: Annotated[str, typer.Option(metavar="N|A-B", help="So many seeds from 1 on, or those from A to B.")] = "100",
    workloads: Workloads = None,
    answers_within: Annotated[
        int, typer.Option(metavar="K", help="Run every schedule within K answers of the eager order.")
    ] = 1,
    requests: Requests = None,
    traces: Traces = None,
    max_time: Annotated[float | None, typer.Option(help="Seconds after which it stops.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run the I-th of N shares; see kvcheck merge.")] = "1/1",
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: one for each core.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run as tasks of Ray: local, auto, HOST:PORT or ray://...")
    ] = None,
    mutant: Annotated[str | None, typer.Option(help="Put a known bug back; see kvcheck list mutants.")] = None,
    lines: Lines = None,
    baseline: Baseline = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    resume: Annotated[bool, typer.Option(help="Go on with the newest campaign of the same plan.")] = False,
    reports: Reports = True,
) -> int:
    """Run the batches of the plan that are left."""
    began = time.monotonic()
    check_choice("--format", format_name, FORMATS)
    for name, number in (("--traces", traces), ("--max-time", max_time), ("--requests", requests), ("--jobs", jobs)):
        check_positive(name, number)
    check_positive("--workloads", workloads)
    outputs = parse_outputs(output, format_name)
    passing("loading")
    plan = _plan(ctx)
    known = KnownFindings(baseline)
    check_outputs(outputs)
    make_folder(out)
    failing = FailingLines(out / LINES if lines is None else lines, plan)
    with closing(_crew(jobs, ray)) as crew:
        return _run(ctx, plan, crew, _Asked(known, failing, outputs, None if max_time is None else began + max_time))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a campaign is run with, beside its plan. until: the time.monotonic() at which it ends."""

    known: KnownFindings
    failing: FailingLines
    outputs: list[tuple[str, Path]]
    until: float | None


def _run(ctx: typer.Context, plan: CampaignPlan, crew: Crew, asked: _Asked) -> int:
    """Run what is left of a plan, and tell it; the exit code."""
    from kvcheck.core.stress.campaign.tally import Tally

    given, tally = ctx.params, Tally(plan)
    session = session_of(ctx, plan, limits={name: given[name.removesuffix("_s")] for name in LIMITS})
    done = goes_on_from(session, plan, given["out"]) if given["resume"] else []
    for result in done:
        tally.add(result)
    update(session, tally, complete=False)
    _tell_head(session, plan, tally)
    finished = {each.line for each in done}
    left = (each for each in itertools.chain(asked.failing.batches(), plan.batches()) if each.line not in finished)
    interrupted = _collect(session, tally, crew, left, asked, traces=given["traces"])
    if interrupted:
        tally = _counted_again(session, plan)
    session.warnings += unfound_mutant(given["mutant"], is_found=bool(session.findings))
    session.warnings += sorted(tally.notes)[:MOST_NOTES]
    record = update(session, tally, complete=not interrupted)

    def shown(record: RunRecord) -> RunRecord:
        return asked.known.shown(record, tally.rows)

    tell_rows(session, shown(record))
    asked.failing.tell(session)
    asked.known.tell(session, record)
    _tell_sum(session, tally, interrupted=interrupted)
    return close(session, asked.outputs, reports=given["reports"], interrupted=interrupted, shown=shown)


def _counted_again(session: Session, plan: CampaignPlan) -> Tally:
    """The tally of what is on disk: an interrupt may have come between the write of a batch and its count."""
    from kvcheck.core.stress.campaign.ledger import LEDGER, read_ledger
    from kvcheck.core.stress.campaign.tally import Tally

    tally, path = Tally(plan), session.folder / LEDGER
    for result in read_ledger(path)[0] if path.exists() else ():
        tally.add(result)
    return tally


def _plan(ctx: typer.Context) -> CampaignPlan:
    """The checked plan. Raises UsageError."""
    from kvcheck.core.run.plan import ANSWERS, Plan
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.campaign.batches import CampaignPlan, parse_seeds, parse_shard
    from kvcheck.core.stress.targets.mutants import mutant as card_of
    from kvcheck.core.stress.workload import WORDS

    given = ctx.params
    if given["answers_within"] < 0:
        raise UsageError(f"--answers-within {given['answers_within']}: expected a number from 0 on")
    seeds, shard = parse_seeds(given["seeds"]), parse_shard(given["shard"])
    card = None if given["mutant"] is None else card_of(given["mutant"])
    base = Plan(
        scenario="",
        strategy=ANSWERS,
        mutant=given["mutant"],
        decoder=WORDS if card is None else card.decoder,
        seed=seeds.first,
        requests=given["requests"],
    )
    check_plan(base)
    scenarios = given["scenarios"] or ([] if card is None else [card.scenario])
    shapes = given["shape"] or ([] if card is None else [card.shape])
    cells = row_of(base).cells(base, scenarios, shapes)
    return CampaignPlan(
        cells=tuple(cells),
        seeds=seeds,
        workloads=given["workloads"],
        within=given["answers_within"],
        shard=shard,
    )


def _crew(jobs: int | None, ray: str | None) -> Crew:
    from kvcheck.core.stress.campaign.crew import Children, OwnProcess

    if ray is not None:
        from kvcheck.core.stress.campaign.ray_crew import VARIABLES, RayCrew

        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        return RayCrew(ray, places=jobs, worker=worker.__name__)
    places = jobs or Session.cpus()
    return OwnProcess(target_of) if places == 1 else Children(places, worker.__name__)


def _tell_head(session: Session, plan: CampaignPlan, tally: Tally) -> None:
    """The first line."""
    shard = "" if plan.shard.count == 1 else f", shard {plan.shard}"
    cells, seeds = counted(len(plan.cells), "cell"), counted(len(plan.seeds), "seed")
    about = f"{cells}, {seeds}{shard}, {counted(tally.wanted, 'batch')}"
    if tally.batches:
        about = f"{about}, {tally.batches:,} of them are done"
    session.say(f"kvcheck {session.version}  campaign  run {session.run_id}  {about}")
    session.say()


def _tell_sum(session: Session, tally: Tally, *, interrupted: bool) -> None:
    """How much was done, what it cost, and how to go on."""
    session.say()
    session.say(f" {_sum(tally)}, {tally.cpu_s:,.0f} CPU seconds of schedules")
    if tally.batches < tally.wanted and not interrupted:
        session.say(f" for the others, use larger limits with --resume: {session.repro} --resume")


def _sum(tally: Tally) -> str:
    """How much has been done, in words."""
    return (
        f"{counted(tally.traces, 'distinct trace')}, {counted(tally.schedules, 'schedule')}, "
        f"{tally.batches:,} of {counted(tally.wanted, 'batch')}"
    )


def _progress(session: Session, tally: Tally) -> None:
    rate = f", {tally.traces / tally.cpu_s:.1f} traces a CPU second" if tally.cpu_s else ""
    session.progress(f"{_sum(tally)}{rate}, {counted(len(session.findings), 'finding')}")


def _collect(
    session: Session,
    tally: Tally,
    crew: Crew,
    batches: Iterable[Batch],
    asked: _Asked,
    *,
    traces: int | None,
) -> bool:
    """Take results until nothing is left to run; True when interrupted. What has been judged is kept where an error
    ends it."""
    from kvcheck.core.stress.campaign.crew import results
    from kvcheck.core.stress.campaign.ledger import LEDGER, Ledger

    ledger, saved = Ledger(session.folder / LEDGER), time.monotonic()
    session.progress("starting")
    try:
        for result in results(
            batches, crew, until=asked.until, is_enough=lambda: traces is not None and tally.traces >= traces
        ):
            ledger.add([result])
            tally.add(result)
            asked.failing.take(result)
            if result.findings or time.monotonic() >= saved + SAVED_EVERY_S:
                update(session, tally, complete=False)
                saved = time.monotonic()
            _progress(session, tally)
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept")
        return True
    except KvcheckError as error:
        update(session, tally, complete=False)
        if not session.findings or isinstance(error, InternalError):
            raise
        complain(str(error))
        session.warnings.append(f"the campaign ended early: {error}")
    return False
