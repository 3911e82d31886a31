"""The cells of a run of `kvcheck stress` or `kvcheck probe`: planned, run, printed and closed.

Invariants:
- The exit code is the record's: 0 pass, 1 finding, 4 not enough evidence, 130 interrupted with all judged cells saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcheck.commands import worker
from kvcheck.commands.asked import Asked
from kvcheck.commands.options import check_positive, draw_seed, identity
from kvcheck.commands.probes import engine_facts, pass_lines, plan_facts, split_absent
from kvcheck.commands.stories import explain_findings
from kvcheck.commands.targets import target_of, unfound_mutant
from kvcheck.commands.terminal import cell_lines, columns, complain, warn
from kvcheck.core.base.errors import InternalError, KvcheckError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, RunRecord, Verdict
from kvcheck.core.report.gate.contradictions import changes, contradictions
from kvcheck.core.report.screen import in_fields
from kvcheck.core.run.cell import ScheduleCell
from kvcheck.core.run.plan import ANSWERS, MAX_DIGITS, Plan
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import RunStore
from kvcheck.core.run.turns import CellTask, Limit, Report
from kvcheck.core.stress.mooncake_cell import SCHEDULES as MOST
from kvcheck.core.stress.mooncake_cell import MooncakeCell, exposure

if TYPE_CHECKING:
    from kvcheck.core.probes.changed import Change
    from kvcheck.core.probes.runner import ProbeRunner
    from kvcheck.core.run.outcome import Runner


DEFAULT_SCHEDULES = 24
DEFAULT_CPU_S = 55.0
"""CPU seconds of each process: on an idle machine, a run of everything takes a minute and a half. A busy one takes
longer, and tries as much."""


def strategy_of(text: str) -> tuple[str, int | None]:
    """Return the strategy, and K of answers:K. Raises UsageError."""
    name, colon, within = text.partition(":")
    if not colon:
        return name, None
    if name != ANSWERS or not (within.isascii() and within.isdecimal() and len(within) < MAX_DIGITS):
        raise UsageError(f"--strategy {text}: expected a strategy, or answers:K with a number K from 0 on")
    return name, int(within)


def plan_exploring(cell: ScheduleCell, *, within: int, workloads: int | None) -> None:
    """Make a cell run all schedules within so many answers. workloads: None takes one of each variant."""
    from kvcheck.core.stress.plan_scenario import scenario_of

    cell.within = within
    cell.wanted = 1 if cell.plan.trace is not None else workloads or scenario_of(cell.plan).table.variants
    cell.floor = cell.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun(Asked):
    """Options of a run of cells. within: as in ScheduleCell."""

    schedules: int | None
    min_schedules: int | None
    resume: bool
    jobs: int | None = None
    within: int | None = None
    fails_on_conditional: bool = False

    def __post_init__(self) -> None:
        Asked.__post_init__(self)
        for name in ("schedules", "min_schedules", "jobs"):
            check_positive(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.schedules is not None and self.schedules < (self.min_schedules or 0):
            raise UsageError(
                f"--min-schedules {self.min_schedules}: expected at most --schedules, which is {self.schedules}"
            )

    def drawn(self) -> int:
        """Return the seed; one is drawn if it is not named, or taken from the run to be continued."""
        if self.seed is not None:
            return self.seed
        for _, each in RunStore(self.out).newest_first(lambda error: None) if self.resume else ():
            if each.seed is not None and not each.complete and each.argv[:1] == tuple(self.argv[:1]):
                return each.seed
        return draw_seed()

    def wanted(self, *, is_once: bool) -> int:
        return self.schedules or max(1 if is_once else DEFAULT_SCHEDULES, self.min_schedules or 0)

    def limit(self, *, is_once: bool, beside_s: float) -> Limit:
        """beside_s: CPU seconds left to the cell beside."""
        is_bounded = not is_once and self.schedules is None and self.max_time is None and self.within is None
        return Limit(cpu_s=DEFAULT_CPU_S - beside_s if is_bounded else None, until=self.until)


def run_cells(
    asked: CellRun,
    base: Plan,
    named: list[Plan],
    *,
    engine: ProbeRunner | None = None,
    beside: MooncakeCell | None = None,
    change: Change | None = None,
) -> int:
    """Run and judge the named plans. base: their plan without scenario and shape. engine: started. beside: one more
    cell. change: of the engine's files, which a pass has run."""
    from kvcheck.core.run.runners import row_of

    row, beside = row_of(base), beside or MooncakeCell()
    is_once = base.trace is not None or row.is_once
    wanted = asked.wanted(is_once=is_once)
    plans, absent = split_absent(named, engine)
    plan = {"max_time_s": asked.max_time, "schedules": wanted, **plan_facts([*plans, *beside.plans])}
    if asked.within is not None:
        plan["answers_within"] = asked.within
    about = identity(base.trace, engine, own=base.own_target)
    session = asked.session(drawn=base.seed, plan=plan, resumes=True)
    session.facts, session.identity = {} if engine is None else {"engine": engine_facts(engine)}, about
    # On a device processes would take turns, and a lane that one of them holds is held for its turn only.
    workers = asked.jobs or (1 if row.is_alone or base.on_device else min(len(plans), Session.cpus()))
    _plan_cells(asked, session, plans, wanted, asked.min_schedules)
    _plan_cells(asked, session, beside.plans, min(wanted, MOST), MOST)
    tasks = _tasks(session, asked.out if asked.resume else None)
    for line in (exposed := exposure(base)):
        warn(line)
    session.warnings += [*absent, *(of_row := row.untried(base, named)), *beside.untried, *exposed]
    _tell_head(session, base, workers, engine)
    asked.draw(session)
    interrupted = _collect(session, tasks, workers, asked.limit(is_once=is_once, beside_s=beside.cpu_s), engine)
    _tell_end(session, base.mutant, asked.max_time, interrupted=interrupted)
    shown = of_row if base.own_target or row.tells_notes or base.on_device else ()
    session.untried += [*absent, *shown, *beside.untried]
    if change is not None and engine is not None:
        _tell_change(session, change, engine, interrupted=interrupted)
    return asked.close(session, interrupted=interrupted)


def _tell_end(session: Session, mutant: str | None, max_time: float | None, *, interrupted: bool) -> None:
    if not interrupted:
        explain_findings(session, max_time)
    is_found = any(cell.findings for cell in session.cells.values())
    for line in unfound_mutant(mutant, is_found=is_found):
        session.warnings.append(line)
        for cell in session.cells.values():
            cell.reason = cell.reason or line
    for cell in session.cells.values():
        if mutant is not None and cell.told is None and cell.evidence.schedules:
            _tell_cell(session, cell)


def _tell_change(session: Session, change: Change, engine: ProbeRunner, *, interrupted: bool) -> None:
    """Add which changed lines ran. If none did, no cell passes."""
    texts = change.texts(engine.ran)
    session.warnings += texts
    session.untried = [*texts, *session.untried]
    if not interrupted and not change.has_run(engine.ran):
        for cell in session.cells.values():
            cell.reason = cell.reason or "no changed line ran"


def _tell_head(session: Session, base: Plan, workers: int, engine: ProbeRunner | None) -> None:
    cells = f"{counted(len(session.cells), 'cell')} in {counted(workers, 'process')}"
    about = base.own_target or "kvcheck's own cache"
    if engine is not None:
        hello = engine.start()
        torch = f", torch {hello.torch}" if hello.torch else ""
        about = f"{hello.engine} {hello.version}, Python {hello.python}{torch}"
    parts = f"kvcheck {session.version}", about, f"seed {base.seed}", f"run {session.run_id}", cells
    for line in in_fields(parts, columns()):
        session.say(line)
    for line in pass_lines([(cell.plan, cell.floor) for cell in session.cells.values()], session.plan["max_time_s"]):
        session.say(line)
    session.detail()


def _plan_cells(asked: CellRun, session: Session, plans: Sequence[Plan], wanted: int, least: int | None) -> None:
    from kvcheck.core.run.cell import floor_of

    for plan in plans:
        floor = floor_of(plan, wanted=wanted, least=least)
        cell = ScheduleCell(plan=plan, wanted=wanted, floor=floor, fails_on_conditional=asked.fails_on_conditional)
        if asked.within is not None:
            plan_exploring(cell, within=asked.within, workloads=asked.schedules)
        session.cells[plan.cell] = cell


def _tasks(session: Session, out: Path | None) -> list[CellTask]:
    """out: the folder with an interrupted run to continue, or None."""
    from kvcheck.core.run.runners import row_of

    if out is not None:
        _resume(session, out)
    return [
        CellTask(
            plan=cell.plan,
            schedules=cell.wanted,
            floor=cell.floor,
            before=cell.evidence,
            confirms=row_of(cell.plan).confirms,
            fails_on_conditional=cell.fails_on_conditional,
            within=cell.within,
        )
        for cell in session.cells.values()
        if not cell.is_done
    ]


def _collect(session: Session, tasks: list[CellTask], workers: int, limit: Limit, shared: Runner | None) -> bool:
    """Take reports until all cells are done; True when interrupted. An error keeps the findings so far."""
    session.progress(f"starting with {counted(len(tasks), 'cell')}")
    try:
        with session.ticking():
            for name, report in _reports(tasks, workers, limit, shared):
                _take(session, session.cells[name], report)
    except KeyboardInterrupt:
        complain("interrupted: what was judged is kept")
        return True
    except KvcheckError as error:
        if not session.findings or isinstance(error, InternalError):
            raise
        complain(str(error))
        for cell in session.cells.values():
            if not (cell.is_done or cell.is_enough):
                cell.is_done, cell.reason = True, cell.reason or f"the run ended before it: {error}"
    return False


def _reports(tasks: list[CellTask], workers: int, limit: Limit, shared: Runner | None) -> Iterator[tuple[str, Report]]:
    """Cells of real processes mostly wait, so they share one more process. CUDA cells run in another process, which a
    lost context may end; so does the user's own code, which may end its process."""
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.run.turns import take_turns
    from kvcheck.core.run.workers import run_in_workers

    alone = [number for number, task in enumerate(tasks) if row_of(task.plan).is_alone]
    others = [number for number in range(len(tasks)) if number not in alone]
    shares = [others[first::workers] for first in range(min(workers, len(others)))]
    is_apart = any(task.plan.backend == "cuda" or task.plan.own_target is not None for task in tasks)
    if shared is not None or (not is_apart and (workers == 1 or len(shares) + bool(alone) == 1)):
        reports = take_turns([*enumerate(tasks)], limit, target_of, shared)
    else:
        reports = run_in_workers(tasks, shares, limit, worker.__name__, beside=alone)
    for report in reports:
        yield tasks[report.cell].plan.cell, report


def _take(session: Session, cell: ScheduleCell, report: Report) -> None:
    if report.note and report.note not in session.warnings:
        session.warnings.append(report.note)
        cell.notes += [report.note] * report.is_note_told
        session.untried += [report.note] * report.is_note_told
    if report.error is not None:
        _child_died(session, cell, report)
        return
    if report.is_left:
        return
    session.take(cell, report)
    is_pass = cell.result().verdict is Verdict.PASS
    if is_pass and cell.plan.mutant is not None:
        return  # it is a pass once a cell has found the mutant: see _tell_end
    if report.evidence is None or (is_pass and cell.told is None and not cell.findings):
        _tell_cell(session, cell)


def _tell_cell(session: Session, cell: ScheduleCell) -> None:
    """Print the line of a cell that has run enough for a pass, and again only if its end differs."""
    for note in cell.notes:
        session.detail(f"       {note}")
    cell.notes.clear()
    found = sum(each.cell == cell.id for each in session.findings)
    row = cell.result()
    if cell.told != found or row.verdict is not Verdict.PASS:
        for line in cell_lines(row, session.findings):
            session.detail(line)
    cell.told = found


def _child_died(session: Session, cell: ScheduleCell, report: Report) -> None:
    """End the cell of a stopped process: a finding, unless the process gave another reason."""
    cell.is_done = True
    if report.exit_code in (2, 4, 70):
        cell.reason = report.error
    else:
        from kvcheck.core.run.workers import died

        session.add(cell, (died(cell.plan, report),), Evidence(schedules=1), 0.0)
    _tell_cell(session, cell)


def _resume(session: Session, out: Path) -> None:
    """Take over cells of the newest interrupted run of the same plan and code."""
    is_refused, unlike, any_time = False, None, {"max_time_s": None}
    for record in earlier_runs(session, out):
        if record.complete or record.plan | any_time != session.plan | any_time:
            unlike = unlike or (None if record.complete else record)
            continue
        if other := not_gone_on_with(record, session):
            note(session, f"--resume skips run {record.run_id}, which {other}")
            is_refused = True
            continue
        session.keep(record.findings)
        for row in record.scenarios:
            session.cells[row.id].take_over(row, sum(each.cell == row.id for each in record.findings))
        kept = [cell for cell in session.cells.values() if cell.evidence.schedules]
        session.warnings += [
            line for line in record.warnings if any(line.startswith(f"{cell.id}: ") for cell in kept if cell.is_done)
        ]
        done = sum(cell.is_done for cell in kept)
        cells = counted(len(record.scenarios), "cell")
        session.say(f"resuming {record.run_id}: done {done} of {cells}, {len(kept) - done} begun")
        return
    if is_refused:
        session.say("resuming nothing: all cells start anew")
        return
    raise nothing_to_resume(session, out, unlike)


def nothing_to_resume(session: Session, out: Path, unlike: RunRecord | None) -> UsageError:
    """Remove the folder of the run. unlike: the newest interrupted run of another plan."""
    session.withdraw()
    if unlike is None:
        return UsageError(f"--resume: no interrupted run in {out}; leave --resume out to begin one")
    return UsageError(
        f"--resume: no interrupted run of this plan and seed; the newest in {out}: {unlike.repro} --resume"
    )


def earlier_runs(session: Session, out: Path) -> Iterator[RunRecord]:
    def skipped(error: UsageError) -> None:
        note(session, f"--resume skips a run: {error}")

    return (each for _, each in RunStore(out).newest_first(skipped) if each.run_id != session.run_id)


def note(session: Session, text: str) -> None:
    session.warnings.append(text)
    warn(text)


def not_gone_on_with(record: RunRecord, session: Session) -> str | None:
    if wrong := contradictions(record):
        return f"contradicts itself: {'; '.join(wrong)}"
    changed = changes(record.identity, session.identity)
    if not changed and (then := record.environment.get("engine")) != (now := session.facts.get("engine")):
        changed = [f"the engine's surroundings: {then} then, {now} now"]
    return f"is about something else: {'; '.join(changed)}" if changed else None
