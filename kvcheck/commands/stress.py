"""`kvcheck stress`: scenarios over shapes, each a cell of schedules, of kvcheck's own cache or of the user's code."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcheck.commands.elsewhere import check_subject
from kvcheck.commands.options import (
    DEFAULT_OUT,
    Format,
    MinSchedules,
    Out,
    Outputs,
    Reports,
    Resume,
    Seed,
    Verbose,
    check_plan,
    check_positive,
    search,
    subject,
    where,
)
from kvcheck.commands.run_cells import DEFAULT_CPU_S, DEFAULT_SCHEDULES, CellRun, run_cells, strategy_of
from kvcheck.commands.seeds import many_seeds, run_seeds
from kvcheck.commands.terminal import passing
from kvcheck.core.base.cells import PROCESS_TRANSPORTS, STREAMED, kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.stress.mooncake_cell import SCHEDULES as OVER_MOONCAKE
from kvcheck.core.stress.mooncake_cell import mooncake_cell
from kvcheck.core.stress.workload import WORDS

OF_DEVICES = ("portfolio", "eager", "delay")
"""Strategies on a device, which runs operations as soon as possible and can hold a lane."""

Names = Annotated[
    list[str] | None, typer.Argument(metavar="SCENARIO", help="See kvcheck list scenarios. Default: all of them.")
]
Shapes = Annotated[
    list[str] | None,
    subject(
        help="See kvcheck list shapes; repeatable. Default: micro and tiny ones; for answers "
        "micro ones alone, for a trace, processes or a device tiny ones."
    ),
]
Target = Annotated[str, subject(metavar="MODULE:NAME", help="Code of your own, in place of kvcheck's cache.")]
Mutant = Annotated[str | None, subject(help="Put a known bug back; see kvcheck list mutants.")]
Trace = Annotated[
    str | None, subject(metavar="FILE", help="Requests in Mooncake's JSONL format; sample: invented ones.")
]
Requests = Annotated[int | None, subject(help="Number of requests in a schedule, or to read from the trace.")]
Decoder = Annotated[
    str | None,
    subject(help="See kvcheck list decoders. Default: words, or the one that shows the mutant.", hidden=True),
]

Schedules = Annotated[
    int | None,
    search(
        help=f"Schedules of each cell (scenario and shape). Default: {DEFAULT_SCHEDULES}; 1 for a trace and for ranks "
        f"that are processes; {OVER_MOONCAKE} for the cell over mooncake."
    ),
]
MaxTime = Annotated[
    float | None,
    search(
        help="Seconds after which the whole run stops. Default: "
        f"{DEFAULT_CPU_S:g} CPU seconds for each process, and more where a cell needs them for a pass."
    ),
]
Strategy = Annotated[
    str,
    search(
        help="Order of operations: portfolio, eager, lazy, delay, random or answers. answers:K: every schedule whose "
        "answers differ from the eager order's in at most K places; --schedules is then the number of workloads."
    ),
]
Seeds = Annotated[str | None, search(metavar="A-B", help="Run all seeds from A to B, for hours; go on with --resume.")]

Device = Annotated[str, where(help="cpu, threads, cuda or cuda:N.")]
Transport = Annotated[
    str | None,
    where(
        help="loopback: one process. tcp, mooncake, ipc: one for each rank; with ipc they share memory, of this host "
        "or of --device cuda. Default: loopback, and one cell over mooncake where it can be used."
    ),
]
Ranks = Annotated[
    str | None, where(metavar="PxD", help="Prefill and decode ranks, such as 2x2. Default: schedules alternate.")
]
Jobs = Annotated[int | None, where(help="Processes. Default: one for each core, at most one for each cell.")]
Shard = Annotated[
    str | None, where(metavar="I/N", help="With --seeds: the I-th of N shares of them; see kvcheck merge.")
]
Ray = Annotated[
    str | None, where(metavar="ADDRESS", help="With --seeds: run as tasks of Ray; local, auto or HOST:PORT.")
]
Backend = Annotated[
    str | None, where(help="simulated, eager, threads, cuda. Default: by device and transport.", hidden=True)
]


def stress(
    ctx: typer.Context,
    scenarios: Names = None,
    shape: Shapes = None,
    target: Target = "builtin",
    mutant: Mutant = None,
    trace: Trace = None,
    requests: Requests = None,
    schedules: Schedules = None,
    min_schedules: MinSchedules = None,
    max_time: MaxTime = None,
    seed: Seed = None,
    seeds: Seeds = None,
    strategy: Strategy = "portfolio",
    device: Device = "cpu",
    transport: Transport = None,
    ranks: Ranks = None,
    jobs: Jobs = None,
    shard: Shard = None,
    ray: Ray = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
    verbose: Verbose = False,
    resume: Resume = False,
    backend: Backend = None,
    decoder: Decoder = None,
) -> int:
    strategy, within = strategy_of(strategy)
    asked = CellRun.of(ctx, within=within)
    many = many_seeds(asked, seeds=seeds, shard=shard, ray=ray, trace=trace)
    check_subject("stress", (target, *(scenarios or ())))
    passing("loading")
    base = Plan(
        scenario="",
        target=target,
        decoder=decoder or _decoder_of(mutant),
        mutant=mutant,
        backend=backend or _backend_of(device, transport),
        device=device,
        transport=transport or "loopback",
        ranks=ranks or ("1x1" if transport in PROCESS_TRANSPORTS else None),
        strategy="random" if trace is not None and strategy == "portfolio" else strategy,
        seed=asked.drawn(),
        requests=requests,
        trace=trace,
    )
    _check(base, strategy)
    plans = _cells(base, scenarios or [], shape or [])
    asked.check_places()
    if many is not None:
        return run_seeds(asked, plans, many)
    beside = mooncake_cell(plans, transport=transport, max_time_s=max_time, least=min_schedules)
    return run_cells(asked, base, plans, beside=beside)


def _decoder_of(name: str | None) -> str:
    from kvcheck.core.stress.targets.mutants import mutant

    return WORDS if name is None else mutant(name).decoder


def _backend_of(device: str, transport: str | None) -> str:
    kind = kind_of(device)
    return "eager" if transport in PROCESS_TRANSPORTS else kind if kind in STREAMED else "simulated"


def _check(plan: Plan, strategy: str) -> None:
    """Raise UsageError for a plan that cannot run, or a strategy that a device does not take."""
    from kvcheck.core.stress.strategies import STRATEGIES

    check_positive("--requests", plan.requests)
    if strategy in ("replay", "flip"):
        raise UsageError(f"--strategy {strategy}: use kvcheck replay with the line that a failure printed")
    STRATEGIES.require(strategy)
    if plan.is_in_process and plan.on_device and strategy not in (*OF_DEVICES, ANSWERS):
        raise UsageError(
            f"--strategy {strategy}: expected {', '.join(OF_DEVICES[:-1])} or {OF_DEVICES[-1]} with --device "
            f"{plan.device}, which completes operations in an order of its own; got {strategy}; next: --strategy "
            "delay, which holds lanes, or --device cpu"
        )
    check_plan(plan)


def _cells(base: Plan, scenarios: list[str], shapes: list[str]) -> list[Plan]:
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.targets.mutants import mutant

    if base.mutant is not None:
        card = mutant(base.mutant)
        scenarios, shapes = scenarios or [card.scenario], shapes or [card.shape]
    return row_of(base).cells(base, scenarios, shapes)
