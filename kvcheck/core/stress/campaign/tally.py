"""The tally of a campaign: rows and findings of its cells from the set of results, in any order.

Invariants:
- A pass needs the same as in `kvcheck stress`: enough schedules, and evidence that the situation was reached. It also
  needs one workload that was run whole; the row has the number of the others.
- A finding is reported once a cell. A line that failed before counts as a finding if it still fails, and as no
  evidence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, Finding, ScenarioResult
from kvcheck.core.run.cell import decided
from kvcheck.core.run.coverage import coverage, floor_of, tried_by
from kvcheck.core.run.exploring import scope_text
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.turns import reported_once
from kvcheck.core.stress.campaign.batches import BatchResult, CampaignPlan
from kvcheck.core.stress.runner import evidence_gap

Key = tuple[str, str | None, str | None]


class _CellTally:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.evidence = Evidence()
        self.duration_s = 0.0
        self.whole = self.ended = 0
        self.reasons: dict[int, str] = {}
        self._tried: dict[str, tuple[int, int]] = {}

    def add(self, result: BatchResult) -> None:
        self.evidence = self.evidence.plus(result.evidence)
        self.duration_s += result.duration_s
        self.whole += result.is_whole
        self.ended += 1
        for at, name in enumerate(tried_by(result.plan)):
            place = result.at, at
            self._tried[name] = min(place, self._tried.get(name, place))
        if result.reason is not None:
            self.reasons[result.at] = result.reason

    @property
    def tried(self) -> tuple[str, ...]:
        """Names tried by its workloads, in the order of the batches."""
        return tuple(sorted(self._tried, key=self._tried.__getitem__))


class Tally:
    def __init__(self, plan: CampaignPlan) -> None:
        self._plan = plan
        self._cells = {cell.cell: _CellTally(cell) for cell in plan.cells}
        self._failing: list[BatchResult] = []
        self.batches = self.lines = 0
        self.traces = self.schedules = 0
        self.cpu_s = 0.0
        self.notes: set[str] = set()
        self._wanted = _wanted(plan)

    @property
    def wanted(self) -> int:
        return sum(self._wanted.values())

    def add(self, result: BatchResult) -> None:
        """Count a result, which must be of one of the plan's batches."""
        self.cpu_s += result.cpu_s
        if result.findings:
            self._failing.append(result)
        if result.within is None:
            self.lines += 1
            return
        self.batches += 1
        self.traces += result.evidence.traces or 0
        self.schedules += result.evidence.schedules
        self.notes.update(result.notes)
        self._cells[result.plan.cell].add(result)

    def rows(self, findings: Iterable[Finding], *, missing: str | None = None) -> tuple[ScenarioResult, ...]:
        """Return the rows of the cells. findings: those that fail a cell. missing: why no cell can pass, or None."""
        failed = {each.cell for each in findings if each.condition is None}
        return tuple(self._row(cell, is_failed=name in failed, missing=missing) for name, cell in self._cells.items())

    def findings(self) -> list[tuple[Finding, ...]]:
        """Return the findings of each batch that are new in its cell, in the order of the batches."""
        told: dict[str, set[Key]] = {}
        return [fresh for each in ordered(self._failing) if (fresh := _fresh(each, told))]

    def _row(self, cell: _CellTally, *, is_failed: bool, missing: str | None) -> ScenarioResult:
        reason = None if is_failed else self._why_unknown(cell) or missing
        verdict, code = decided(is_failed=is_failed, reason=reason)
        ran, left = cell.evidence.schedules, self._wanted[cell.plan.cell] - cell.ended
        found = coverage(cell.plan, wanted=ran, floor=floor_of(cell.plan, wanted=0), ran=(), earlier=cell.tried)
        not_tried = [*found.not_tried]
        if left:
            not_tried.append(f"{left:,} of {counted(self._wanted[cell.plan.cell], 'workload')}")
        if part := cell.ended - cell.whole:
            not_tried.append(f"the rest of {counted(part, 'workload')} that ended early")
        return ScenarioResult(
            id=cell.plan.cell,
            shape=cell.plan.tried_with,
            verdict=verdict,
            code=code,
            reason=reason,
            schedules=ran,
            duration_s=round(cell.duration_s, 3),
            evidence=cell.evidence,
            coverage=dataclasses.replace(
                found, not_tried=tuple(not_tried), scope=scope_text(cell.whole, within=self._plan.within)
            ),
        )

    def _why_unknown(self, cell: _CellTally) -> str | None:
        """Why a cell without a finding is no pass; None if it is one."""
        if cell.reasons:
            return cell.reasons[min(cell.reasons)]
        floor = floor_of(cell.plan, wanted=0)
        if cell.evidence.schedules < floor:
            why = f"{counted(cell.evidence.schedules, 'schedule')} ran, and a pass takes {floor}"
            return f"{why}: use a larger --max-time, --traces or --seeds"
        if not cell.whole:
            return "no workload was run whole: use a larger --max-time, or a smaller --answers-within"
        return evidence_gap(cell.plan, cell.evidence)


def ordered(found: Iterable[BatchResult]) -> list[BatchResult]:
    return sorted(found, key=lambda each: each.at)


def _wanted(plan: CampaignPlan) -> dict[str, int]:
    return {cell.cell: plan.share_of(place) for place, cell in enumerate(plan.cells)}


def _fresh(result: BatchResult, told: dict[str, set[Key]]) -> tuple[Finding, ...]:
    """Causes of a batch that no earlier one of their cell had, each with its symptoms."""
    seen = told.setdefault(result.plan.cell, set())
    earlier = frozenset(seen)
    is_kept: dict[str, bool] = {}  # by id, which is that of one schedule
    kept: list[Finding] = []
    for each in result.findings:
        if each.cause is None:
            is_kept[each.id] = reported_once(each) not in earlier
            seen.add(reported_once(each))
        if is_kept.get(each.cause or each.id, False):
            kept.append(each)
    return tuple(kept)
