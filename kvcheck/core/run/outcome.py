"""Outcome: the result of one schedule of any subject. Runner: runs a schedule."""

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
    """gap: why the delays of a device imposed no order, or None."""

    @property
    def gap(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """divergence: from the recorded path of a replay. digest: of choices, events, findings. asked: names that strategy
    "answers" could have answered with "no", in order. refused: the "no" answers; under another strategy, only those to
    questions. trace: its host trace, or 0. unknown: why it is no evidence. is_lost: its process did not answer.
    is_device_lost: the device is unusable in this process."""

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
        if self.findings:
            return Verdict.FAIL
        is_held = self.delays is None or self.delays.gap is None
        return Verdict.PASS if is_held and not self.divergence and self.unjudged is None else Verdict.UNKNOWN

    @property
    def unjudged(self) -> str | None:
        return f"an oracle broke: {self.broken_oracles[0]}" if self.broken_oracles else self.unknown


class Runner(Protocol):
    """cpu_s: CPU seconds of a child of its own."""

    @property
    def cpu_s(self) -> float: ...

    def run(self, plan: Plan) -> Outcome: ...

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        """Return the missing evidence of the plan's cell, or None."""

    def closing(self) -> str | None:
        """Return a note on the whole cell, or None."""


def complete(finding: Finding, plan: Plan) -> Finding:
    line = dataclasses.replace(plan, expect=finding.code).line()
    return dataclasses.replace(
        finding, scenario=plan.scenario, shape=plan.tried_with, schedule=line, replay=f"kvcheck replay {line}"
    )
