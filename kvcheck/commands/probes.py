"""Installed engines as targets: which options they accept, and the child process that imports the engine.

Invariants:
- An engine that cannot be imported is one line and exit 4, before a run is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.stress.schedule import Kind, Plan

if TYPE_CHECKING:
    from kvcheck.core.stress.probe_runner import ProbeRunner


def check_jobs(plan: Plan, jobs: int | None) -> None:
    """Raise UsageError for several processes where one child holds the engine."""
    from kvcheck.core.stress.runner_rows import row_of

    if jobs not in (None, 1) and row_of(plan).is_shared:
        raise UsageError(f"--jobs {jobs}: one child holds {plan.target} and runs all its cells; leave it out")


def plan_facts(plans: list[Plan]) -> dict[str, object]:
    """What the record's plan says of the cells: their first lines, of an engine's what each is about and the variables
    it was given, and the pool family of each shape."""
    from kvcheck.core.stress.runner_rows import row_of
    from kvcheck.core.workload.shapes import SHAPES

    shows = {plan.cell: text for plan in plans if (text := row_of(plan).shows(plan)) is not None}
    families = {plan.shape: SHAPES[plan.shape].family for plan in plans if plan.shape in SHAPES}
    given = plans[0].engine_variables if plans else {}
    facts = {"shows": shows, "families": families, "engine_env": given}
    return {"cells": [plan.line() for plan in plans], **{name: each for name, each in facts.items() if each}}


@contextmanager
def installed_engine(plan: Plan) -> Iterator[ProbeRunner | None]:
    """The plan's engine, ready; None for a target of kvcheck's own. Raises UnknownVerdict."""
    if plan.kind is not Kind.PROBE:
        yield None
        return
    from kvcheck.core.stress.probe_runner import ProbeRunner

    runner = ProbeRunner(plan.target, device=plan.device, variables=plan.engine_variables)
    try:
        runner.start()
        yield runner
    finally:
        runner.close()


def engine_facts(runner: ProbeRunner | None) -> dict[str, object]:
    """What the record says of the engine."""
    return {} if runner is None else {"engine": to_plain(runner.start())}
