"""The row of a subject that kvcheck does not know: a dial, which some schedules find stuck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.run.outcome import Outcome, TargetOf, complete
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import RunnerRow

DIALS = {"round": None, "stuck": 2}
"""Each dial, and the schedule from which on it is stuck."""


class DialRunner:
    """Turns a dial, and looks where it points."""

    cpu_s = 0.0

    def run(self, plan: Plan) -> Outcome:
        stuck = DIALS[plan.shape]
        findings = ()
        if stuck is not None and plan.schedule >= stuck:
            findings = (complete(Finding(code="KV105", oracle="dial", message="it points elsewhere"), plan),)
        return Outcome(plan=plan, findings=findings, evidence=Evidence(schedules=1, requests=1), digest=plan.schedule)

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return None if total.requests else "not exercised: nothing was turned"

    def closing(self) -> str | None:
        return None


class DialRow(RunnerRow):
    """Dials."""

    floor = 2

    def takes(self, plan: Plan) -> bool:
        return plan.target == "dials"

    def make(self, plan: Plan, target_of: TargetOf) -> DialRunner:
        return DialRunner()

    def check_names(self, plan: Plan) -> None:
        if plan.shape not in DIALS:
            raise UsageError(f"expected a dial of {', '.join(DIALS)}; got {plan.shape}")

    def check(self, plan: Plan) -> None:
        self.check_names(plan)

    def cells(self, base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
        return [replace(base, scenario="turn", shape=name) for name in shapes or DIALS]

    def tried(self, plan: Plan) -> tuple[str, ...]:
        return ("left" if plan.schedule % 2 else "right",)


DIAL = DialRow()
