"""ProcessEngine: one plan in, one judged outcome out, with every rank in a process of its own.

Invariants:
- The reference run, the count of bytes and the judgement are made here, by the process that moved nothing.
- The same plan makes the same work; in which order things happen is the machine's, and is not recorded.
"""

from __future__ import annotations

import zlib

from kvcheck.core.pools import POOLS
from kvcheck.core.record import Evidence
from kvcheck.core.stress.engine import Outcome, complete
from kvcheck.core.stress.processes.supervisor import Supervisor
from kvcheck.core.stress.processes.verdict import judge
from kvcheck.core.stress.processes.work import ranks_of, work_of
from kvcheck.core.stress.scenarios.serving import reference_outputs
from kvcheck.core.stress.schedule import Plan
from kvcheck.core.workload.shapes import shape as shape_named


class ProcessEngine:
    """Runs plans. note: what the last run moved, in words."""

    def __init__(self) -> None:
        self.note = ""

    def run(self, plan: Plan) -> Outcome:
        """Run and judge one schedule. Raises UnknownVerdict where a library is missing."""
        shape, load = work_of(plan)
        supervisor = Supervisor(plan)
        stories = supervisor.run()
        found = judge(stories, shape, load, reference_outputs(shape, load, "loopback"), silence=supervisor.silence)
        prefill, decode = ranks_of(plan)
        self.note = (
            f"{plan.scenario}/{plan.shape}: {prefill}x{decode} processes over {plan.transport}, "
            f"{found.verified:,} bytes verified at the receivers, {found.expected:,} worked out beforehand"
        )
        findings = tuple(complete(finding, plan) for finding in found.findings)
        told = repr([sorted(story.finished.items()) for story in stories.values()])
        return Outcome(
            plan=plan,
            findings=findings,
            evidence=found.evidence,
            broken_oracles=(),
            digest=zlib.crc32(told.encode()),
            judged={"bytes": found.verified},
        )


def process_gap(plan: Plan, evidence: Evidence) -> str | None:
    """What a cell did not exercise, or None."""
    shape = shape_named(plan.shape)
    buffers = {buffer.name for spec in POOLS.load(shape.family)(shape) for buffer in spec.buffers}
    unread = sorted(name for name in buffers | {"metadata", "sealed"} if not evidence.words_verified.get(name))
    if not evidence.transfers:
        return "no transfer happened; use more requests"
    return f"no word of {', '.join(unread)} was verified" if unread else None
