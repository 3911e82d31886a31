"""Installed engines as targets: what their options may be, and the child that is started before anything is judged.

Invariants:
- An option that a probe does not read is refused, not ignored.
- An engine that cannot be imported is one line and exit 4, before a run is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.stress.schedule import Plan

if TYPE_CHECKING:
    from kvcheck.core.stress.probe_runner import EngineRunner

UNREAD = ("mutant", "backend", "device", "transport", "ranks", "strategy", "requests", "trace", "choices")
"""Keys of a plan that no probe reads: they have to be what they are by default."""


def check_engine_plan(plan: Plan) -> None:
    """Raise UsageError for what an engine's probes do not take."""
    from kvcheck.core.probes.installed import parse_target

    parse_target(plan.target)
    default = Plan(scenario=plan.scenario, shape=plan.shape)
    if plan.device != "cpu":
        default = dataclasses.replace(default, device=plan.device, backend="cuda")
    for key in UNREAD:
        if (value := getattr(plan, key)) != getattr(default, key):
            raise UsageError(f"--target {plan.target}: its probes take no {key}, got {value!r}; leave it out")


def check_jobs(plan: Plan, jobs: int | None) -> None:
    """Raise UsageError for several processes where one child holds the engine."""
    from kvcheck.core.probes.installed import is_engine

    if jobs not in (None, 1) and is_engine(plan.target):
        raise UsageError(f"--jobs {jobs}: one child holds {plan.target} and runs all its cells; leave it out")


def engine_plans(base: Plan, scenarios: list[str], shapes: list[str]) -> list[Plan]:
    """The plans of a run. Raises UsageError where no probe is left."""
    from kvcheck.core.stress.probe_runner import probe_plans
    from kvcheck.core.stress.scenarios import SCENARIOS

    tried = {plan.scenario for plan in probe_plans(base, [], [])}
    for name in scenarios:
        if name not in tried:
            SCENARIOS.require(name)
    plans = list(probe_plans(base, scenarios, shapes))
    if not plans:
        known = ", ".join(f"{plan.scenario}: {plan.shape}" for plan in probe_plans(base, [], []))
        if not known:
            raise UsageError(
                f"no probe of {base.target} runs on {base.device}; leave --device out to run them on the CPU"
            )
        raise UsageError(f"no probe of {base.target} is left by the scenarios and shapes named; it has {known}")
    return plans


def plan_facts(plans: list[Plan]) -> dict[str, object]:
    """What the record's plan says of the cells: their first lines, and of an engine's what each is about."""
    from kvcheck.core.probes.installed import is_engine

    lines = [plan.line() for plan in plans]
    if not any(is_engine(plan.target) for plan in plans):
        return {"cells": lines}
    from kvcheck.core.stress.probe_runner import probe_of

    return {"cells": lines, "shows": {plan.cell: probe_of(plan)[0].shows for plan in plans}}


def not_exercised(base: Plan, plans: list[Plan]) -> list[str]:
    """Scenarios that no probe of the engine tries, and probes that this run leaves out; one line each at most."""
    from kvcheck.core.probes.installed import is_engine

    if not is_engine(base.target):
        return []
    from kvcheck.core.stress.probe_runner import probe_plans
    from kvcheck.core.stress.scenarios import SCENARIOS

    every = list(probe_plans(base, [], []))
    tried, ran = {plan.scenario for plan in every}, {plan.cell for plan in plans}
    lacking = [name for name in SCENARIOS.names() if name not in tried]
    left = [plan.cell for plan in every if plan.cell not in ran]
    lines = [f"not exercised: {', '.join(lacking)}: no probe of {base.target} tries them"] if lacking else []
    return lines + ([f"not exercised: left out by what was named: {', '.join(left)}"] if left else [])


@contextmanager
def installed_engine(plan: Plan) -> Iterator[EngineRunner | None]:
    """The plan's engine, ready; None for a target of kvcheck's own. Raises UnknownVerdict."""
    from kvcheck.core.probes.installed import is_engine

    if not is_engine(plan.target):
        yield None
        return
    from kvcheck.core.stress.probe_runner import EngineRunner

    runner = EngineRunner(plan.target, device=plan.device)
    try:
        runner.start()
        yield runner
    finally:
        runner.close()


def engine_facts(runner: EngineRunner | None) -> dict[str, object]:
    """What the record says of the engine."""
    return {} if runner is None else {"engine": to_plain(runner.start())}
