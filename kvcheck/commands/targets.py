"""The target that a plan tests. This module knows the mutants, which core may not import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.run.plan import Plan

if TYPE_CHECKING:
    from kvcheck.core.stress.runner import ScheduleRunner
    from kvcheck.core.stress.targets.target import Target


def target_of(plan: Plan) -> Target:
    """Return the target of a plan: kvcheck's, the user's own, or a mutant. Raises UsageError."""
    from kvcheck.core.stress.targets import TARGETS
    from kvcheck.core.stress.targets.mutants import mutant_target
    from kvcheck.core.stress.targets.own import load_own

    if plan.mutant is not None:
        return mutant_target(plan.mutant)
    return TARGETS.load(plan.target)() if plan.target in TARGETS.names() else load_own(plan.target)


def runner_of(plan: Plan) -> ScheduleRunner:
    from kvcheck.core.stress.runner import ScheduleRunner

    return ScheduleRunner(target_of(plan))


def unfound_mutant(mutant: str | None, *, is_found: bool) -> list[str]:
    if mutant is None or is_found:
        return []
    from kvcheck.core.stress.targets.mutants import mutant as named

    found = f"; next: kvcheck selftest {mutant}, which answers by chance" if named(mutant).within else ""
    return [f"mutant {mutant} was put back and nothing was found: this run is no evidence for the fixed code{found}"]
