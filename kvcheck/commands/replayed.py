"""Replayed: what the runs of one replayed line gave.

Invariants:
- Lines of schedules, probes and running servers are told alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvcheck.core.base.record import Verdict
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.run.plan import Plan


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one line's runs. agreed: how many had the result of the first. told: lines for the terminal."""

    verdict: Verdict
    agreed: int
    told: list[str]

    def to_json(self, plan: Plan | RoundPlan, times: int) -> str:
        """One line of JSON."""
        row = {"line": plan.line(), "cell": plan.cell, "verdict": self.verdict.value}
        return json.dumps({**row, "agreed": self.agreed, "times": times, "text": "\n".join(self.told).strip()})
