"""`kvcheck stress --target http://HOST:PORT --own-model`: the model that a server serves, judged against its own noise.

Invariants:
- What cannot be asked as it was asked is one line and exit 2, before a run has a folder: a server without
  log-probabilities or without a way to be asked cold is such a line.
- With --reference the server is compared with what the folder holds before its own scenarios run.
"""

from __future__ import annotations

import dataclasses
import time

import typer

from kvcheck.commands.closing import close
from kvcheck.commands.live import SERVED, RunOptions, options_of_servers, plan_scenarios
from kvcheck.commands.live_rounds import end_rounds, run_rounds
from kvcheck.commands.options import repro
from kvcheck.commands.own_server import connected
from kvcheck.commands.reference import compare_with
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.conclusion import RoundCell
from kvcheck.core.live.counting import parse_requirements
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.own.plan import OwnPlan
from kvcheck.core.live.own.reference import check_alike, read_reference
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder

DEFAULT_ROUNDS = 1


def stress_own_model(ctx: typer.Context) -> int:
    """Run the scenarios against one server, and judge them by what it answers without reuse."""
    began = time.monotonic()
    run, server = options_of_servers(ctx)
    if server.known_answers is not None:
        raise UsageError(
            "--own-model and --known-answers: expected one of both; a known-answer model needs no comparison with noise"
        )
    outputs = parse_outputs(run.output, run.format_name)
    required = parse_requirements(server.require or [])
    kept = None if server.reference is None else read_reference(server.reference)
    client, served, base = connected(run.target, server, requests=run.requests, seed=run.seed)
    untold = [] if kept is None else check_alike(kept, served)
    progress, untried = plan_scenarios(
        run, lambda name: dataclasses.replace(base, situation=name), client, served, rounds=DEFAULT_ROUNDS
    )
    rounds = sum(each.wanted for each in progress) + (kept is not None)
    runner = OwnRunner(
        client,
        vocabulary=base.vocabulary,
        rounds=rounds,
        requests=base.requests,
        timeout_s=server.timeout_s,
    )
    runner.begin(served, names=base.names)
    check_outputs(outputs)
    make_folder(run.out)
    session = _session(ctx, run, base, progress, dict(required), untried)
    session.facts = {"server": _facts(served, base)}
    place = f"{served.engine} {served.version or ''}".strip()
    model = f"{served.model} " if served.model else ""
    session.say(f"kvcheck {session.version}  seed {base.seed}  run {session.run_id}  {model}on {place} at {run.target}")
    session.say()
    if untold:
        session.warnings.append(f"neither the reference nor this server says: {', '.join(untold)}")
    until = None if run.max_time is None else began + run.max_time
    interrupted = kept is not None and compare_with(session, kept, client, base, rounds=rounds, until=until)
    if not interrupted:
        interrupted = run_rounds(session, runner, progress, until)
    for each in progress:
        session.warnings += runner.notes(each.plan)
    end_rounds(session, progress, required, client, untried)
    return close(session, outputs, reports=run.reports, interrupted=interrupted)


def _facts(served: Served, base: OwnPlan) -> dict[str, object]:
    """What the record says of the server."""
    return {
        "address": base.target,
        "decode": base.decode,
        "vocabulary": base.vocabulary,
        **{name: getattr(served, name) for name in SERVED},
        "said": dict(served.facts),
    }


def _session(
    ctx: typer.Context,
    run: RunOptions,
    base: OwnPlan,
    progress: list[RoundCell[OwnPlan]],
    required: dict[str, int],
    untried: list[str],
) -> Session:
    return Session(
        argv=[*ctx.obj],
        repro=repro(ctx.obj, seed=run.seed, drawn=base.seed),
        seed=base.seed,
        plan={
            "cells": [each.plan.line() for each in progress],
            "scenarios": [each.plan.cell for each in progress],
            "schedules": run.schedules or DEFAULT_ROUNDS,
            "max_time_s": run.max_time,
            "require": required,
            "not_tried": untried,
        },
        out=run.out,
        teller=Terminal(is_quiet=run.format_name == "json"),
    )
