"""`kvcheck stress`: scenarios over shapes, each a cell of schedules, of kvcheck's own cache or of the user's code."""

from __future__ import annotations

import time

import typer

from kvcheck.commands import stress_options as given
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
    check_plan,
    check_positive,
    draw_seed,
)
from kvcheck.commands.run_cells import CellRun, run_cells, strategy_of
from kvcheck.commands.seeds import many_seeds, run_seeds
from kvcheck.commands.terminal import passing
from kvcheck.core.base.cells import PROCESS_TRANSPORTS, STREAMED, kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.stress.mooncake_cell import mooncake_cell
from kvcheck.core.stress.workload import WORDS

OF_DEVICES = ("portfolio", "eager", "delay")
"""Strategies on a device, which runs operations as soon as possible and can hold a lane."""


def stress(
    ctx: typer.Context,
    scenarios: given.Names = None,
    shape: given.Shapes = None,
    target: given.Target = "builtin",
    mutant: given.Mutant = None,
    trace: given.Trace = None,
    requests: given.Requests = None,
    schedules: given.Schedules = None,
    min_schedules: MinSchedules = None,
    max_time: given.MaxTime = None,
    seed: Seed = None,
    seeds: given.Seeds = None,
    strategy: given.Strategy = "portfolio",
    answers_within: given.AnswersWithin = None,
    device: given.Device = "cpu",
    transport: given.Transport = None,
    ranks: given.Ranks = None,
    jobs: given.Jobs = None,
    shard: given.Shard = None,
    ray: given.Ray = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
    resume: Resume = False,
    backend: given.Backend = None,
    decoder: given.Decoder = None,
) -> int:
    asked = CellRun(
        argv=ctx.obj,
        began=time.monotonic(),
        schedules=schedules,
        min_schedules=min_schedules,
        max_time=max_time,
        seed=seed,
        out=out,
        output=output,
        format_name=format_name,
        resume=resume,
        reports=reports,
        jobs=jobs,
        within=answers_within,
    )
    many = many_seeds(asked, seeds=seeds, shard=shard, ray=ray, trace=trace)
    check_subject("stress", (target, *(scenarios or ())))
    passing("loading")
    strategy = strategy_of(strategy, answers_within)
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
        seed=draw_seed() if seed is None else seed,
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
