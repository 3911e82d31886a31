"""Installed engines as targets: their options, and the child process that imports the engine.

Invariants:
- An engine that cannot be imported is one line and exit 4, before a run is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcheck.core.base.causes import CONDITIONAL, place_of
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, RunRecord, Verdict
from kvcheck.core.probes.installed import ENGINES
from kvcheck.core.run.plan import Plan

if TYPE_CHECKING:
    from kvcheck.core.probes.runner import ProbeRunner


def plan_facts(plans: list[Plan]) -> dict[str, object]:
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.workload.shapes import SHAPES

    shows = {plan.cell: text for plan in plans if (text := row_of(plan).shows(plan)) is not None}
    families = {plan.shape: SHAPES[plan.shape].family for plan in plans if plan.shape in SHAPES}
    given = plans[0].engine_variables if plans else {}
    facts = {"shows": shows, "families": families, "engine_env": given}
    return {"cells": [plan.line() for plan in plans], **{name: each for name, each in facts.items() if each}}


@contextmanager
def installed_engine(plan: Plan) -> Iterator[ProbeRunner | None]:
    """Yield the plan's engine, started; None for kvcheck's own target. Raises UnknownVerdict."""
    if plan.probe is None:
        yield None
        return
    from kvcheck.core.probes.runner import ProbeRunner

    runner = ProbeRunner(plan.target, device=plan.device, variables=plan.engine_variables)
    try:
        runner.start()
        yield runner
    finally:
        runner.close()


def engine_facts(runner: ProbeRunner) -> dict[str, object]:
    """Return what a record keeps of the engine, which is no path of this machine."""
    facts = asdict(runner.start())
    del facts["folder"]
    return facts


def split_absent(plans: list[Plan], runner: ProbeRunner | None) -> tuple[list[Plan], list[str]]:
    """Return the plans that the release can run, and a line for each dropped subject."""
    absent = {} if runner is None else runner.start().absent
    lines = [f"{plan.cell}: not in this release: {absent[plan.cell]}" for plan in plans if plan.cell in absent]
    return [plan for plan in plans if plan.cell not in absent], lines


def pass_lines(floors: Sequence[tuple[Plan, int]], max_time: object) -> list[str]:
    """Return how long a pass takes with an engine's waiting probes. floors: schedules of a pass."""
    from kvcheck.core.probes.runner import probe_of

    needed = [(probe_of(plan)[0].schedule_s, floor) for plan, floor in floors if plan.probe is not None]
    seconds = sum(each * floor for each, floor in needed)
    if not seconds:
        return []
    few = isinstance(max_time, int | float) and max_time < seconds
    schedules = counted(max(floor for _, floor in needed), "schedule")
    return [
        f" a pass takes {schedules} of each cell, about {seconds:.0f} s on two quiet cores"
        + (f"; --max-time {max_time:g} is too short for it" if few else "")
    ]


def reviewed_findings(record: RunRecord, findings: Sequence[Finding]) -> dict[tuple[str, str], list[Finding]]:
    """Return conditional findings known of this release to be harmless, by cell and reason.

    Failing cells are left out: the user chose to fail by them, or something else is wrong.
    """
    engine = record.environment.get("engine")
    if not isinstance(engine, dict):
        return {}
    passing = {row.id for row in record.scenarios if row.verdict is Verdict.PASS}
    why_of = {
        (f"{row.scenario}/{row.name}.{each.subject}", f"{place}{CONDITIONAL}"): each.why
        for row in ENGINES.load(str(engine["engine"])).probes
        for each in row.reviewed
        if engine["version"] in each.releases
        for place in each.places
    }
    known: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        why = why_of.get((finding.cell, f"{finding.code} {place_of(finding)}"))
        if why is not None and finding.cell in passing:
            known.setdefault((finding.cell, why), []).append(finding)
    return known
