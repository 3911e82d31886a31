"""Schedules by what they try: the first of a cell that has the settings which a test is about."""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.plan_scenario import variant_of
from kvcheck.core.stress.rows import settings_tried_by
from kvcheck.core.stress.scenarios.disturber import CALM_EVERY

FARTHEST = 1000


def with_settings(plan: Plan, *wanted: str, at: int = 0, is_calm: bool = False, every: int = 1) -> Plan:
    """The first schedule of the plan's cell, from its own on, that has these settings. at: so many such are passed.
    is_calm: only schedules that the disturber leaves alone. every: only variants whose number is a multiple of it."""
    for number in range(plan.schedule, plan.schedule + FARTHEST):
        found = replace(plan, schedule=number)
        if variant_of(found) % every or (is_calm and variant_of(found) % CALM_EVERY):
            continue
        if {*wanted} <= {*settings_tried_by(found)}:
            if not at:
                return found
            at -= 1
    raise LookupError(f"no schedule of {plan.cell} has {', '.join(wanted)}")
