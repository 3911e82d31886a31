"""RankRunner: runs one plan with every rank in a process of its own and judges the outcome.

Invariants:
- The same plan makes the same work. The order of events depends on the machine and is not recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from kvcheck.core.base.causes import in_causal_order
from kvcheck.core.base.record import Evidence
from kvcheck.core.run.outcome import Outcome, complete
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.oracles.liveness import finding_of
from kvcheck.core.stress.ranks.supervisor import RankReport, Supervisor
from kvcheck.core.stress.ranks.verdict import judge
from kvcheck.core.stress.ranks.work import ranks_of, work_of
from kvcheck.core.stress.runner import evidence_gap, reference_run


class RankRunner:
    cpu_s = 0.0

    def run(self, plan: Plan) -> Outcome:
        """Run and judge one schedule. Raises UnknownVerdict if a library is missing."""
        shape, load = work_of(plan)
        supervisor = Supervisor(plan)
        reports = supervisor.run()
        reference = reference_run(plan, load)
        if reference.broke is not None:
            crash = in_causal_order([complete(finding_of(reference.broke), plan)])
            return Outcome(plan=plan, findings=crash, evidence=Evidence(schedules=1), digest=0)
        found = judge(reports, shape, load, reference.outputs, silence=supervisor.silence)
        prefill, decode = ranks_of(plan)
        note = (
            f"{plan.cell}: {prefill}x{decode} processes over {plan.transport}, "
            f"{found.verified:,} bytes verified at the receivers, {found.expected:,} expected; "
            f"{_done(reports.values(), found.evidence)}"
        )
        findings = in_causal_order(complete(finding, plan) for finding in found.findings)
        outputs = repr([sorted(report.finished.items()) for report in reports.values()])
        return Outcome(
            plan=plan,
            findings=findings,
            evidence=found.evidence,
            digest=zlib.crc32(outputs.encode()),
            judged={"bytes": found.verified},
            note=note,
        )

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return evidence_gap(plan, total)

    def closing(self) -> str | None:
        return None


def _done(reports: Iterable[RankReport], evidence: Evidence) -> str:
    told = list(reports)
    faulted = {request for report in told for request in report.faulted}
    stalled = {request for report in told for request in report.stalled}
    return (
        f"{evidence.aborts or 0} aborted, {evidence.retractions or 0} retracted, {len(faulted)} with a fault, "
        f"{len(stalled)} held back"
    )
