"""RankRunner: runs one plan with every rank in a process of its own and judges the outcome.

Invariants:
- The same plan makes the same work. The order of events depends on the machine and is not recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from kvcheck.core.base.causes import in_causal_order
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS
from kvcheck.core.cache.transfer.mooncake.library import require_library
from kvcheck.core.run.outcome import Outcome, Runner, TargetOf, complete
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.oracles.liveness import finding_of
from kvcheck.core.stress.ranks.spec import ranks_of, work_of
from kvcheck.core.stress.ranks.supervisor import RankReport, Supervisor
from kvcheck.core.stress.ranks.verdict import judge
from kvcheck.core.stress.rows import ScheduleRow, check_choices
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


class RanksRow(ScheduleRow):
    floor = 1
    confirms = False
    is_once = is_alone = True
    tells_notes = True

    def takes(self, plan: Plan) -> bool:
        return plan.has_rank_processes

    def make(self, plan: Plan, target_of: TargetOf) -> Runner:
        return RankRunner()

    def check(self, plan: Plan) -> None:
        """Refuse plans that real processes cannot run. A missing library is UNKNOWN before any process starts."""
        strategy = None if plan.trace is not None else plan.strategy
        for name, value, able in (
            ("--backend", plan.backend, "eager"),
            ("--mutant", plan.mutant, None),
            ("--strategy", strategy or "portfolio", "portfolio"),
        ):
            if value != able:
                raise UsageError(
                    f"{name} {value}: --transport {plan.transport} runs real processes, in no chosen order"
                )
        if plan.device == "threads":
            raise UsageError(
                f"--device threads: --transport {plan.transport} runs ranks as processes; leave one of them out"
            )
        if plan.device != "cpu" and plan.transport not in SHARING_TRANSPORTS:
            able = " or ".join(SHARING_TRANSPORTS)
            raise UsageError(
                f"--device {plan.device}: the ranks of --transport {plan.transport} have host memory alone; expected "
                f"--device cpu, or --transport {able}"
            )
        if plan.transport == "mooncake":
            require_library()
        check_choices(plan)

    def order(self, plan: Plan) -> str:
        return "the machine's order"

    def left_out(self, plan: Plan) -> tuple[str, ...]:
        return ("chosen orders",)

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        if base.transport not in SHARING_TRANSPORTS or base.device != "cpu":
            return []
        return [
            "not tried: copies of a device, and NVLink: on a host, bytes land in the order in which its CPU stores "
            f"them; next, where there is a GPU: kvcheck stress nvlink-aux --transport {base.transport} --device cuda"
        ]


RANKS = RanksRow()
