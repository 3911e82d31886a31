"""RankRunner: one plan in, one judged outcome out, with every rank in a process of its own.

Invariants:
- The reference run, the count of bytes and the judgement are made here, by the process that moved nothing.
- The same plan makes the same work; in which order things happen is the machine's, and is not recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from kvcheck.core.base.record import Evidence
from kvcheck.core.stress.ranks.child import Launcher
from kvcheck.core.stress.ranks.supervisor import RankReport, Supervisor
from kvcheck.core.stress.ranks.verdict import judge
from kvcheck.core.stress.ranks.work import ranks_of, work_of
from kvcheck.core.stress.runner import Outcome, complete, evidence_gap
from kvcheck.core.stress.scenarios.serving import reference_outputs
from kvcheck.core.stress.schedule import Plan


class RankRunner:
    """Runs plans. launcher: where ranks are started; None: here."""

    cpu_s = 0.0

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher

    def run(self, plan: Plan) -> Outcome:
        """Run and judge one schedule. Raises UnknownVerdict where a library is missing."""
        shape, load = work_of(plan)
        supervisor = Supervisor(plan, launcher=self._launcher)
        stories = supervisor.run()
        found = judge(stories, shape, load, reference_outputs(shape, load, "loopback"), silence=supervisor.silence)
        prefill, decode = ranks_of(plan)
        note = (
            f"{plan.cell}: {prefill}x{decode} processes over {plan.transport}, "
            f"{found.verified:,} bytes verified at the receivers, {found.expected:,} worked out beforehand; "
            f"{_done(stories.values(), found.evidence)}"
        )
        findings = tuple(complete(finding, plan) for finding in found.findings)
        told = repr([sorted(story.finished.items()) for story in stories.values()])
        return Outcome(
            plan=plan,
            findings=findings,
            evidence=found.evidence,
            digest=zlib.crc32(told.encode()),
            judged={"bytes": found.verified},
            note=note,
        )

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return evidence_gap(plan, total)

    def closing(self) -> str | None:
        return None


def _done(stories: Iterable[RankReport], evidence: Evidence) -> str:
    """What was done to requests, in words."""
    told = list(stories)
    faulted = {request for story in told for request in story.faulted}
    stalled = {request for story in told for request in story.stalled}
    return (
        f"{evidence.aborts or 0} aborted, {evidence.retractions or 0} retracted, {len(faulted)} with a fault, "
        f"{len(stalled)} held back"
    )
