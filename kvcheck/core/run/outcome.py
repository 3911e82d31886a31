"""Outcome: what one schedule of any subject gave; Runner: what gives it.

Invariants:
- A finding fails a schedule. One that is no evidence, or has left its recorded path, is no pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvcheck.core.base.record import Evidence, Finding, Verdict
from kvcheck.core.run.plan import Plan

TargetOf = Callable[[Plan], object]
"""The target of a plan, fixed or broken; rows of subjects without targets do not call it."""


class Delays(Protocol):
    """What came of the delays that a device was asked for. gap: why they imposed no order, or None."""

    @property
    def gap(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one schedule gave. divergence: how a replay left the recorded path. digest: of choices, events, findings.

    asked: what strategy "answers" could have answered with "no", in order. refused: what was answered so; the answers
    to questions, where another strategy ran. trace: the number of its host trace; 0 where none was taken. unknown: why
    it is no evidence, None where it is. is_lost: the process that ran it did not answer. is_device_lost: nothing runs
    on the device any more in this process. note: for the record.
    """

    plan: Plan
    findings: tuple[Finding, ...]
    evidence: Evidence
    broken_oracles: tuple[str, ...] = ()
    digest: int
    judged: Mapping[str, int] = field(default_factory=dict)
    divergence: str | None = None
    asked: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    trace: int = 0
    delays: Delays | None = None
    unknown: str | None = None
    is_lost: bool = False
    is_device_lost: bool = False
    note: str | None = None

    @property
    def verdict(self) -> Verdict:
        """FAIL with findings; UNKNOWN with a broken oracle, off the recorded path, or if no delay held; else PASS."""
        if self.findings:
            return Verdict.FAIL
        is_held = self.delays is None or self.delays.gap is None
        return Verdict.PASS if is_held and not self.divergence and self.unjudged is None else Verdict.UNKNOWN

    @property
    def unjudged(self) -> str | None:
        """Why it cannot count as a pass, whatever was not found; None where it can."""
        return f"an oracle broke: {self.broken_oracles[0]}" if self.broken_oracles else self.unknown


class Runner(Protocol):
    """Runs the schedules of a cell, or of all cells of a run. cpu_s: CPU seconds that a child of its own has taken."""

    @property
    def cpu_s(self) -> float: ...

    def run(self, plan: Plan) -> Outcome:
        """One schedule, judged."""

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        """What the plan's cell has not exercised, or None."""

    def closing(self) -> str | None:
        """What is told of the whole cell, or None."""


def complete(finding: Finding, plan: Plan) -> Finding:
    line = dataclasses.replace(plan, expect=finding.code).line()
    return dataclasses.replace(
        finding, scenario=plan.scenario, shape=plan.tried_with, schedule=line, replay=f"kvcheck replay {line}"
    )
