"""Losing: a runner that loses its device in a run that a test names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan

PLAN = Plan(scenario="hicache", shape="llama-3-micro", seed=1, backend="cuda", device="cuda", strategy="eager")
HELD = replace(PLAN, strategy="delay")
CRASH = Finding(code="KV902", oracle="liveness", message="the context of cuda is lost")


@dataclass
class Losing:
    """Stands in for a runner; the device is lost in these runs."""

    lost_in: int
    ran: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    missing: str | None = None
    finding: Finding = CRASH

    def run(self, plan: Plan) -> Outcome:
        self.ran.append(f"{plan.scenario} {plan.schedule}")
        is_lost = len(self.ran) == self.lost_in
        findings = (self.finding,) if is_lost else ()
        evidence = Evidence(schedules=1)
        return Outcome(plan=plan, evidence=evidence, findings=findings, digest=0, is_device_lost=is_lost)

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return self.missing

    def closing(self) -> str | None:
        return "the rates"
