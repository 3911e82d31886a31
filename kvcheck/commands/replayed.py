"""Replayed: the result of one replayed line of a schedule, a probe or a running server."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvcheck.core.base.record import Verdict
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.run.plan import Plan


@dataclass(frozen=True, slots=True)
class Replayed:
    """agreed: runs with the result of the first one."""

    verdict: Verdict
    agreed: int
    told: list[str]

    def to_json(self, plan: Plan | RoundPlan, times: int) -> str:
        row = {"line": plan.line(), "cell": plan.cell, "verdict": self.verdict.value}
        return json.dumps({**row, "agreed": self.agreed, "times": times, "text": "\n".join(self.told).strip()})
