"""`kvcheck stress`: scenarios over shapes, each a cell of schedules, judged and recorded.

Invariants:
- Everything the user named is checked before anything runs.
- The exit code is the record's: 0 pass, 1 finding, 4 not enough evidence, 130 interrupted with what was judged saved.
- A pass says how many schedules ran of how many wanted, and what they did not try.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands import live, own, worker
from kvcheck.commands import seeds as many
from kvcheck.commands.closing import close
from kvcheck.commands.exploring import plan_exploring, strategy_of
from kvcheck.commands.options import (
    DEFAULT_OUT,
    FORMATS,
    ConditionalFails,
    Format,
    MinSchedules,
    Out,
    Outputs,
    Reports,
    Seed,
    check_choice,
    check_plan,
    check_positive,
    draw_seed,
    identity,
    repro,
)
from kvcheck.commands.probes import check_jobs, engine_facts, installed_engine, pass_lines, plan_facts, split_absent
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.session import Cell, Session
from kvcheck.commands.smaller import look_for_smaller
from kvcheck.commands.stories import tell_stories
from kvcheck.commands.stress_options import (
    DEFAULT_CPU_S,
    DEFAULT_SCHEDULES,
    MAX_TIME_HELP,
    NUMBERS,
    SCHEDULES_HELP,
    AnswersWithin,
    Backend,
    Decoder,
    EngineEnv,
    Jobs,
    Names,
    Ranks,
    Requests,
    Shapes,
    Strategy,
    Target,
    Trace,
    Transport,
)
from kvcheck.commands.targets import target_of, unfound_mutant
from kvcheck.commands.terminal import cell_lines, complain, passing, warn
from kvcheck.core.base.cells import is_engine
from kvcheck.core.base.devices import STREAMED, kind_of
from kvcheck.core.base.errors import InternalError, KvcheckError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, RunRecord, Verdict, read_record
from kvcheck.core.cache.transfer import PROCESS_TRANSPORTS
from kvcheck.core.live.clients.connection import check_scheme, is_address
from kvcheck.core.report.gate.builds import changes
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.report.store import RUN_FILE, RunStore, make_folder
from kvcheck.core.stress.cell_task import CellTask, Limit, Report
from kvcheck.core.stress.mooncake_cell import SCHEDULES as MOST
from kvcheck.core.stress.mooncake_cell import exposure, mooncake_cell
from kvcheck.core.stress.schedule import ANSWERS, Kind, Plan
from kvcheck.core.stress.workload import WORDS

if TYPE_CHECKING:
    from kvcheck.core.stress.probe_runner import ProbeRunner
    from kvcheck.core.stress.runner import Runner
    from kvcheck.core.stress.runner_rows import RunnerRow

OF_DEVICES = ("portfolio", "eager", "delay")
"""Strategies on a device: it runs what it can as soon as it can, and a lane of it can be held."""


def stress(
    ctx: typer.Context,
    scenarios: Names = None,
    shape: Shapes = None,
    device: Annotated[str, typer.Option(help="cpu, threads, cuda or cuda:N.")] = "cpu",
    backend: Backend = None,
    strategy: Strategy = "portfolio",
    decoder: Decoder = None,
    answers_within: AnswersWithin = None,
    schedules: Annotated[int | None, typer.Option(help=SCHEDULES_HELP)] = None,
    min_schedules: MinSchedules = None,
    max_time: Annotated[float | None, typer.Option(help=MAX_TIME_HELP)] = None,
    seed: Seed = None,
    trace: Trace = None,
    requests: Requests = None,
    mutant: Annotated[str | None, typer.Option(help="Put a known bug back; see kvcheck list mutants.")] = None,
    transport: Transport = None,
    ranks: Ranks = None,
    jobs: Jobs = None,
    target: Target = "builtin",
    engine_env: EngineEnv = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    resume: Annotated[bool, typer.Option(help="Continue the newest interrupted run of the same plan.")] = False,
    seeds: many.Seeds = None,
    shard: many.Shard = None,
    ray: many.Ray = None,
    fail_on_conditional: ConditionalFails = False,
    reports: Reports = True,
    known_answers: live.Folder = None,
    own_model: live.OwnModel = False,
    vocabulary: live.Vocabulary = None,
    reference: live.Reference = None,
    decode: live.Decode = None,
    engine_name: live.Engine = None,
    metrics: live.Metrics = None,
    require: live.Require = None,
    concurrency: live.Concurrency = None,
    timeout: live.Timeout = None,
    key_env: live.KeyEnv = None,
    admin: live.Admin = False,
    allow_remote: live.AllowRemote = False,
) -> int:
    """Run the cells that were named, and judge them."""
    until = None if max_time is None else time.monotonic() + max_time
    _check_given(ctx)
    if is_address(target):
        return own.stress_own_model(ctx) if own_model else live.stress_server(ctx)
    base, row = _base_plan(ctx, draw_seed() if seed is None else seed)
    plans = row.cells(base, *_names(base, scenarios or [], shape or []))
    wanted, bounded = _schedules(ctx, row)
    check_outputs(outputs := parse_outputs(output, format_name))
    make_folder(out)  # whether it can be made is said before an engine is imported, which takes its time
    if seeds is not None:
        return many.stress_seeds(ctx, plans, outputs, schedules=wanted, until=until)
    beside = mooncake_cell(plans, transport=transport, max_time_s=max_time, least=min_schedules)
    with installed_engine(base) as engine:
        named, (plans, absent) = plans, split_absent(plans, engine)
        session = _session(ctx, base, {"schedules": wanted, **plan_facts([*plans, *beside.plans])}, engine)
        workers = jobs or _workers(base, row, len(plans))
        limit = Limit(cpu_s=DEFAULT_CPU_S - beside.cpu_s if bounded else None, until=until)
        _plan_cells(ctx, session, plans, wanted, min_schedules)
        _plan_cells(ctx, session, beside.plans, min(wanted, MOST), MOST)
        tasks = _tasks(session, out if resume else None)
        told = _untried(session, base, row.untried(base, named), [*absent, *beside.untried])
        _tell_head(session, base, workers, engine)
        interrupted = _collect(session, tasks, workers, limit, engine)
        _tell_end(session, mutant, told, max_time, interrupted=interrupted)
    return close(session, outputs, reports=reports, interrupted=interrupted)


def _untried(session: Session, base: Plan, of_row: Sequence[str], others: Sequence[str]) -> list[str]:
    """Keep in the record what a run does not try; the lines that are told at its end."""
    from kvcheck.core.stress.runner_rows import row_of

    for line in (exposed := exposure(base)):
        warn(line)
    session.warnings += [*of_row, *others, *exposed]
    return [*others, *(of_row if base.own_target or row_of(base).tells_notes or base.on_device else ())]


def _check_given(ctx: typer.Context) -> None:
    check_scheme("--target", ctx.params["target"])
    check_choice("--format", ctx.params["format_name"], FORMATS)
    for name in NUMBERS:
        check_positive(f"--{name.replace('_', '-')}", ctx.params[name])
    many.check_seeds(ctx)


def _session(ctx: typer.Context, base: Plan, plan: dict[str, object], engine: ProbeRunner | None) -> Session:
    given = ctx.params
    if given["answers_within"] is not None:
        plan = {"answers_within": given["answers_within"], **plan}
    about = identity(base.trace, engine, own=base.own_target)
    session = Session(
        argv=[*ctx.obj],
        repro=repro([word for word in ctx.obj if word != "--resume"], seed=given["seed"], drawn=base.seed),
        seed=base.seed,
        plan={"max_time_s": given["max_time"], **plan},
        out=given["out"],
        quiet=given["format_name"] == "json",
        resumes=True,
    )
    session.facts, session.identity = engine_facts(engine), about
    return session


def tell_untried(session: Session, lines: Sequence[str]) -> None:
    """Lines of what a run did not try, or could not read."""
    for line in lines:
        session.say(f" ----  {line}")


def _tell_end(
    session: Session, mutant: str | None, untried: Sequence[str], max_time: float | None, *, interrupted: bool
) -> None:
    """What is told behind the cells: stories, smaller schedules, a mutant that was not found, what was not tried."""
    if not interrupted:
        with session.ticking():
            tell_stories(session, max_time)
            look_for_smaller(session, max_time)
    is_found = any(cell.findings for cell in session.cells.values())
    for line in unfound_mutant(mutant, is_found=is_found):
        session.warnings.append(line)
        for cell in session.cells.values():
            cell.reason = cell.reason or line
            _tell_cell(session, cell)
    tell_untried(session, untried)


def _schedules(ctx: typer.Context, row: RunnerRow) -> tuple[int, bool]:
    """Schedules of a cell, and whether the run's CPU time is bounded. Raises UsageError."""
    given = ctx.params
    once = given["trace"] is not None or row.is_once
    wanted = _wanted(given["schedules"], given["min_schedules"], usual=1 if once else DEFAULT_SCHEDULES)
    is_bounded = given["schedules"] is None and not once and given["max_time"] is None
    return wanted, is_bounded and given["answers_within"] is None


def _wanted(schedules: int | None, least: int | None, *, usual: int) -> int:
    """Schedules of a cell. Raises UsageError where fewer are asked for than have to be."""
    if schedules is not None and schedules < (least or 0):
        raise UsageError(f"--min-schedules {least}: expected at most --schedules, which is {schedules}")
    return schedules or max(usual, least or 0)


def _workers(base: Plan, row: RunnerRow, cells: int) -> int:
    """Processes that run cells at a time. On a device they would take turns, and a lane that one of them holds is held
    for its turn only; an engine has one child.
    """
    return 1 if row.is_alone or base.on_device else min(cells, Session.cpus())


def _tell_head(session: Session, base: Plan, workers: int, engine: ProbeRunner | None) -> None:
    """The first line of a run."""
    cells = counted(len(session.cells), "cell")
    about = f"{cells}, {counted(workers, 'process')}"
    if base.own_target is not None:
        about = f"{about}, {base.own_target}"
    if engine is not None:
        hello = engine.start()
        torch = f", torch {hello.torch}" if hello.torch else ""
        about = f"{cells}, {hello.engine} {hello.version} on Python {hello.python}{torch}"
    session.say(f"kvcheck {session.version}  seed {base.seed}  run {session.run_id}  {about}")
    for line in pass_lines([(cell.plan, cell.floor) for cell in session.cells.values()], session.plan["max_time_s"]):
        session.say(line)
    session.say()


def _plan_cells(ctx: typer.Context, session: Session, plans: Sequence[Plan], wanted: int, least: int | None) -> None:
    from kvcheck.core.stress.coverage import floor_of

    for plan in plans:
        cell = Cell(
            plan=plan,
            wanted=wanted,
            floor=floor_of(plan, wanted=wanted, least=least),
            fails_on_conditional=ctx.params["fail_on_conditional"],
        )
        if (within := ctx.params["answers_within"]) is not None:
            plan_exploring(cell, within=within, workloads=ctx.params["schedules"])
        session.cells[plan.cell] = cell


def _tasks(session: Session, out: Path | None) -> list[CellTask]:
    """What is left to run. out: the folder with the interrupted run to go on with; None: all cells start anew."""
    if out is not None:
        _resume(session, out)
    return [_task(cell) for cell in session.cells.values() if not cell.is_done]


def _task(cell: Cell) -> CellTask:
    from kvcheck.core.stress.runner_rows import row_of

    return CellTask(
        plan=cell.plan,
        schedules=cell.wanted,
        floor=cell.floor,
        before=cell.evidence,
        confirms=row_of(cell.plan).confirms,
        fails_on_conditional=cell.fails_on_conditional,
        within=cell.within,
    )


def _base_plan(ctx: typer.Context, seed: int) -> tuple[Plan, RunnerRow]:
    """The checked plan that all cells share, without scenario and shape; and the row of its runner."""
    from kvcheck.core.stress.probe_runner import engine_env
    from kvcheck.core.stress.runner_rows import row_of
    from kvcheck.core.stress.targets.mutants import mutant

    live.refuse_options_of_servers(ctx)
    passing("loading")
    given = ctx.params
    device, strategy, target = given["device"], strategy_of(given["strategy"], given["answers_within"]), given["target"]
    transport, trace = given["transport"], given["trace"]
    is_apart = transport in PROCESS_TRANSPORTS
    kind = kind_of(device)
    default = "eager" if is_apart else kind if kind in STREAMED else "simulated"
    chosen = given["backend"] or default
    if strategy in ("replay", "flip"):
        raise UsageError(f"--strategy {strategy}: use kvcheck replay with the line that a failure printed")
    plan = Plan(
        scenario="",
        probe="" if is_engine(target) else None,
        target=target,
        decoder=given["decoder"] or (mutant(given["mutant"]).decoder if given["mutant"] is not None else WORDS),
        mutant=given["mutant"],
        backend=chosen,
        device=device,
        transport=transport or "loopback",
        ranks=given["ranks"] or ("1x1" if is_apart else None),
        strategy="random" if trace is not None and strategy == "portfolio" else strategy,
        seed=seed,
        requests=given["requests"],
        trace=trace,
        engine_env=engine_env(given["engine_env"] or ()),
    )
    _check_order(plan, strategy)
    check_plan(plan)
    check_jobs(plan, given["jobs"])
    return plan, row_of(plan)


def _check_order(plan: Plan, strategy: str) -> None:
    """Refuse an order that the user named and a device does not take. The plan's own may be that of a trace."""
    from kvcheck.core.stress.strategies import STRATEGIES

    STRATEGIES.require(strategy)
    if plan.kind is Kind.SCHEDULE and plan.on_device and strategy not in (*OF_DEVICES, ANSWERS):
        raise UsageError(
            f"--strategy {strategy}: expected {', '.join(OF_DEVICES[:-1])} or {OF_DEVICES[-1]} with --device "
            f"{plan.device}, which completes operations in an order of its own; got {strategy}; next: --strategy "
            "delay, which holds lanes, or --device cpu"
        )


def _names(base: Plan, scenarios: list[str], shapes: list[str]) -> tuple[list[str], list[str]]:
    """Scenarios and shapes of a run: what was named, or what shows the mutant."""
    if base.mutant is None:
        return scenarios, shapes
    from kvcheck.core.stress.targets.mutants import mutant

    card = mutant(base.mutant)
    return scenarios or [card.scenario], shapes or [card.shape]


def _collect(session: Session, tasks: list[CellTask], workers: int, limit: Limit, shared: Runner | None) -> bool:
    """Take reports until all cells are done; True when interrupted. Findings are kept where an error ends the run."""
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
    """The reports of all cells, each with its cell's id.

    Cells of real processes mostly wait: of several processes, they share one beside those of the others. A process that
    has lost its CUDA context may be ended by what it frees, so cells on such a device run in another one. So does code
    of the user's own, which may end its process by itself.
    """
    from kvcheck.core.stress.cell_workers import run_in_workers
    from kvcheck.core.stress.runner_rows import row_of
    from kvcheck.core.stress.turns import take_turns

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


def _take(session: Session, cell: Cell, report: Report) -> None:
    if report.note and report.note not in session.warnings:
        session.warnings.append(report.note)
        cell.notes += [report.note] * report.is_note_told
    if report.error is not None:
        _child_died(session, cell, report)
        return
    if report.is_left:
        return
    if report.evidence is not None:
        cell.reason = cell.reason or report.reason
        if report.schedule not in cell.ran:
            cell.ran.append(report.schedule)
        cell.is_exercised = report.gap is None
        session.add(cell, report.findings, report.evidence, report.duration_s)
        if cell.told is None and not cell.findings and cell.result().verdict is Verdict.PASS:
            _tell_cell(session, cell)
        return
    cell.is_done, cell.scope = True, report.scope
    cell.reason = cell.reason or cell.shortfall(report.cut) or report.reason
    session.save(complete=False)
    _tell_cell(session, cell)


def _tell_cell(session: Session, cell: Cell) -> None:
    """The cell's line: once it has run what a pass takes, and again only if its end says something else."""
    for note in cell.notes:
        session.say(f"       {note}")
    cell.notes.clear()
    found = sum(each.cell == cell.id for each in session.findings)
    row = cell.result()
    if cell.told != found or row.verdict is not Verdict.PASS:
        for line in cell_lines(row, session.findings):
            session.say(line)
    cell.told = found


def _child_died(session: Session, cell: Cell, report: Report) -> None:
    """The end of a cell whose process has stopped: a finding, unless the process gave another reason."""
    cell.is_done = True
    if report.exit_code in (2, 4, 70):
        cell.reason = report.error
    else:
        from kvcheck.core.stress.cell_workers import died

        session.add(cell, (died(cell.plan, report),), Evidence(schedules=1), 0.0)
    _tell_cell(session, cell)


def _resume(session: Session, out: Path) -> None:
    """Take over what the newest interrupted run with the same plan has judged: cells that ended, and begun ones.

    Nothing where such runs are about something else or contradict themselves: then all cells start anew.
    """
    is_refused = False
    for run_id in reversed(RunStore(out).run_ids()):
        if run_id == session.run_id:
            continue
        try:
            record = read_record(out / run_id / RUN_FILE)
        except UsageError as error:
            text = f"--resume skips a run: {error}"
            session.warnings.append(text)
            warn(text)
            continue
        if record.complete or record.plan != session.plan:
            continue
        if other := _not_gone_on_with(record, session):
            text = f"--resume skips run {record.run_id}, which {other}"
            session.warnings.append(text)
            warn(text)
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
    session.withdraw()
    raise UsageError(f"--resume: no interrupted run with this plan and seed under {out}; name the seed with --seed")


def _not_gone_on_with(record: RunRecord, session: Session) -> str | None:
    """Why the session cannot continue an interrupted run of its plan, or None."""
    if wrong := contradictions(record):
        return f"contradicts itself: {'; '.join(wrong)}"
    changed = changes(record.identity, session.identity)
    if not changed and (then := record.environment.get("engine")) != (now := session.facts.get("engine")):
        changed = [f"the engine's surroundings: {then} then, {now} now"]
    return f"is about something else: {'; '.join(changed)}" if changed else None
