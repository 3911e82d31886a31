"""What a replay may claim: FIXED needs evidence and the recorded path, and a target that ends the process is a finding.

Invariants:
- Lines come from real runs of one seed; what is changed about them is done in the test.
"""

from __future__ import annotations

import sys

from kvcheck.core.scheduler.scheduler import Scheduler
from kvcheck.core.stress.engine import StressEngine
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.targets.builtin import BuiltinTarget, Parts

PLAN = Plan(scenario="retract-resume", shape="llama-3-tiny", seed=1)


class Quitter(Scheduler):
    """Ends the process, politely, in the middle of the run."""

    def step(self) -> object:  # type: ignore[override]
        """Exit as if all were well."""
        sys.exit(0)


def test_a_target_that_exits_has_crashed() -> None:
    outcome = StressEngine(BuiltinTarget(Parts(scheduler=Quitter))).run(PLAN)
    assert [(finding.code, finding.oracle) for finding in outcome.findings] == [("KV902", "liveness")]
    assert "SystemExit" in outcome.findings[0].message
