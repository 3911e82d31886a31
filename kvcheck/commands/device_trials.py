"""Mutants on a device: what a CPU finds unordered is delayed there, until wrong bytes are served or plans run out.

Invariants:
- A mutant is judged by the bytes that it serves under delays; a missing wait alone, which any run shows, is not enough.
- The fixed build must serve the right bytes under the very plan that shows the mutant, or the mutant is not judged.
- What does not reproduce is UNKNOWN, with the reason, never a pass and never a failure of the fixed build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcheck.commands.options import check_plan
from kvcheck.commands.targets import runner_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import MutantResult, Verdict
from kvcheck.core.stress.schedule import Plan

if TYPE_CHECKING:
    from kvcheck.core.stress.delayed import Try
    from kvcheck.core.targets.mutants.mutant import Mutant

BY_DELAYS = "delays on a device"
"""What has to find a mutant there, in the place of the oracle that its card names."""

JUDGE = "ordering"
"""The oracle that names the two operations to turn round: the mutants it kills are those that lack one wait."""


def timed_mutants(mutants: Sequence[Mutant], device: str) -> list[Mutant]:
    """Those that a delay can show. Raises UsageError where none is, UnknownVerdict where there is no such device."""
    timed = [each for each in mutants if each.killed_by == JUDGE]
    if not timed:
        names = ", ".join(each.name for each in mutants)
        raise UsageError(f"--device {device}: no delay shows {names}; expected a mutant that {JUDGE} kills")
    check_plan(Plan(scenario=timed[0].scenario, shape=timed[0].shape, backend="cuda", device=device, strategy="delay"))
    return timed


def not_begun(mutant: Mutant, device: str, max_time_s: float) -> MutantResult:
    """The row of a mutant that the time was too short for, also one that was under way."""
    row = _row(mutant, mutant.killed_by if device == "cpu" else BY_DELAYS)
    return dataclasses.replace(
        row, outcome="not-begun", message=f"--max-time {max_time_s:g} was over before it was judged"
    )


def judge_on_device(plan: Plan, mutant: Mutant, device: str, schedules: int) -> MutantResult:
    """Find the mutant's missing wait on the CPU, then serve wrong bytes on the device."""
    from kvcheck.core.stress.delayed import device_plans, tries, why_not

    runner, row = runner_of(dataclasses.replace(plan, mutant=mutant.name)), _row(mutant, BY_DELAYS)
    plans: tuple[Plan, ...] = ()
    used = 0
    while not plans and used < schedules:
        plans = device_plans(runner, dataclasses.replace(plan, mutant=mutant.name, schedule=used), device)
        used += 1
    made = list(tries(runner, plans))
    row = dataclasses.replace(row, schedules=used)
    if not made or not made[-1].shown or made[-1].rates.gap:  # wrong bytes while nothing was held are no delay's doing
        rates = f"; {made[-1].rates.text()}" if made else ""
        return dataclasses.replace(
            row, outcome="not-reproduced", message=((made and made[-1].rates.gap) or why_not(made)) + rates
        )
    return _with_fixed_build(row, made)


def _with_fixed_build(row: MutantResult, made: Sequence[Try]) -> MutantResult:
    """The row of a mutant that was shown, once the fixed build has run under the same delays."""
    from kvcheck.core.stress.delayed import run_both

    shown = made[-1]
    fixed = dataclasses.replace(shown.plan, mutant=None)
    for outcome in run_both(runner_of(fixed), fixed):
        if outcome.findings:
            found = outcome.findings[0]
            text = f"the fixed build fails too: {found.code} {found.message}"
            return dataclasses.replace(row, outcome="clean-run-failed", message=text, verdict=Verdict.FAIL)
    if outcome.verdict is not Verdict.PASS:  # of the run under delays, the last of both
        gap = None if outcome.delays is None else outcome.delays.gap
        why = gap or f"an oracle broke: {', '.join(outcome.broken_oracles)}"
        return dataclasses.replace(row, outcome="clean-run-unknown", message=f"the fixed build was not judged: {why}")
    return dataclasses.replace(
        row,
        outcome="reproduced",
        killed_by=f"{shown.plan.choices}, try {len(made)}",
        message=f"{shown.rates.text()}: {shown.message}",
        replay=f"kvcheck replay {shown.plan.line()}",
        verdict=Verdict.PASS,
    )


def _row(mutant: Mutant, killer: str) -> MutantResult:
    return MutantResult(
        name=mutant.name,
        bug=mutant.bug,
        killer=killer,
        outcome="",
        schedules=0,
        verdict=Verdict.UNKNOWN,
    )
