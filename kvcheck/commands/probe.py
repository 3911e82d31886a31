"""`kvcheck probe ENGINE[:ENV]`: drives an installed engine's own code in a child of its own environment."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.elsewhere import check_subject
from kvcheck.commands.options import (
    DEFAULT_OUT,
    ConditionalFails,
    Format,
    MinSchedules,
    Out,
    Outputs,
    Reports,
    Resume,
    Seed,
    Verbose,
    check_plan,
    search,
    subject,
)
from kvcheck.commands.probes import installed_engine
from kvcheck.commands.run_cells import DEFAULT_CPU_S, DEFAULT_SCHEDULES, CellRun, run_cells
from kvcheck.commands.terminal import passing
from kvcheck.core.base.cells import ENGINE_NAMES, is_engine, kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.registry import unknown_name
from kvcheck.core.run.plan import Plan

Engine = Annotated[
    str,
    typer.Argument(
        metavar="ENGINE[:ENV]",
        help=f"{', '.join(ENGINE_NAMES)}; with :ENV, the one in that environment, else the one beside kvcheck.",
    ),
]
Probes = Annotated[
    list[str] | None,
    subject(
        "--probe",
        metavar="NAME",
        help="See kvcheck list probes; repeatable. Also PROBE.SUBJECT, or a scenario. Default: all of them.",
    ),
]
Variables = Annotated[
    list[str] | None,
    subject("--env", metavar="NAME=VALUE", help="A variable of the engine, such as MC_LOG_LEVEL; repeatable."),
]
Changed = Annotated[
    list[str] | None,
    subject(
        "--changed",
        metavar="FILE",
        help="Only probes that run this file of the engine, and whether its changed lines ran; repeatable. Also a "
        "range of its git checkout, up to HEAD: main..HEAD. The first time measures the lines of all probes.",
    ),
]
Device = Annotated[str, subject(help="cpu, cuda or cuda:N.")]
Schedules = Annotated[int | None, search(help=f"Schedules of each probe. Default: {DEFAULT_SCHEDULES}.")]
MaxTime = Annotated[
    float | None, search(help=f"Seconds after which the run stops. Default: {DEFAULT_CPU_S:g} CPU seconds.")
]


def probe(
    ctx: typer.Context,
    engine: Engine,
    probes: Probes = None,
    changed: Changed = None,
    variables: Variables = None,
    device: Device = "cpu",
    schedules: Schedules = None,
    min_schedules: MinSchedules = None,
    max_time: MaxTime = None,
    seed: Seed = None,
    fail_on_conditional: ConditionalFails = False,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
    verbose: Verbose = False,
    resume: Resume = False,
) -> int:
    from kvcheck.commands.changed import pick
    from kvcheck.core.probes.runner import engine_env
    from kvcheck.core.run.runners import row_of

    asked = CellRun.of(ctx, fails_on_conditional=fail_on_conditional)
    if changed and resume:
        raise UsageError("--changed: expected no --resume, as lines that ran are not kept; leave one out")
    check_subject("probe", (engine,))
    if not is_engine(engine):
        raise UsageError(unknown_name("engine", engine, ENGINE_NAMES))
    passing("loading")
    name, _, place = engine.partition(":")
    base = Plan(
        scenario="",
        probe="",
        target=f"{name}:{Path(place).absolute()}" if place else engine,  # so that its lines replay in any folder
        backend="simulated" if kind_of(device) == "cpu" else kind_of(device),
        device=device,
        seed=asked.drawn(),
        engine_env=engine_env(variables or ()),
    )
    check_plan(base)
    plans = row_of(base).cells(base, [], probes or [])
    asked.check_places()
    with installed_engine(base) as runner:
        change = None
        if changed and runner is not None:
            change, plans = pick(changed, plans, runner)
            asked = replace(asked, began=time.monotonic())  # --max-time is the run's, without the measurement
        return run_cells(asked, base, plans, engine=runner, change=change)
