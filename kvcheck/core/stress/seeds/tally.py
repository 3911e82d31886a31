"""The tally of a run of many seeds: the row and the findings of each cell, whatever the order of the batches.

Invariants:
- A pass takes as many schedules and as much evidence as in a run of one seed; if workloads are explored, also one
  explored completely.
- A finding is reported once a cell, with the line of its first batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Coverage, Evidence, Finding, ScenarioResult
from kvcheck.core.run.cell import ROUND, coverage, decided, floor_of, shortfall, tried_by
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.turns import reported_once, scope_text
from kvcheck.core.stress.runner import evidence_gap
from kvcheck.core.stress.seeds.batches import BatchResult, SeedsPlan

MOST_NOTES = 40

Key = tuple[str, str | None, str | None]
Place = tuple[int, int, int]
"""Sort key of a batch: its seed, its workload, and its cell."""


class _CellTally:
    """wanted: its batches. first: the first batch of each finding that is reported once."""

    def __init__(self, plan: Plan, wanted: int) -> None:
        self.plan, self.wanted = plan, wanted
        self.evidence = Evidence()
        self.duration_s = 0.0
        self.ended = self.whole = 0
        self.tried: set[str] = set()
        self.reasons: dict[Place, str] = {}
        self.first: dict[Key, Place] = {}


class Tally:
    def __init__(self, plan: SeedsPlan, found: Iterable[BatchResult] = ()) -> None:
        self._schedules, self._within = plan.schedules, plan.within
        self._cells = {cell.cell: _CellTally(cell, len(plan.seeds) * plan.batches_of(cell)) for cell in plan.cells}
        self._at = {name: at for at, name in enumerate(self._cells)}
        self._failing: dict[Place, BatchResult] = {}
        self.batches = 0
        self.cpu_s = 0.0
        self.notes: set[str] = set()
        for each in found:
            self.add(each)

    @property
    def work(self) -> str:
        schedules = sum(cell.evidence.schedules for cell in self._cells.values())
        traces = sum(cell.evidence.traces or 0 for cell in self._cells.values())
        of_batches = f"{self.batches:,} of {counted(self.wanted, 'batch')}"
        return f"{counted(traces, 'distinct trace')}, {counted(schedules, 'schedule')}, {of_batches}"

    @property
    def wanted(self) -> int:
        return sum(cell.wanted for cell in self._cells.values())

    def add(self, result: BatchResult) -> bool:
        """Count a batch of the plan. Return True for a finding that is new in its cell."""
        plan = result.plan
        cell, place = self._cells[plan.cell], (plan.seed, plan.schedule, self._at[plan.cell])
        self.batches += 1
        self.cpu_s += result.cpu_s
        if result.note is not None and len(self.notes) < MOST_NOTES:
            self.notes.add(result.note)
        cell.evidence = cell.evidence.plus(result.evidence)
        cell.duration_s += result.duration_s
        cell.ended += 1
        cell.whole += result.is_whole
        for at in range(result.evidence.schedules if self._within is None else 1):
            cell.tried.update(tried_by(dataclasses.replace(plan, schedule=plan.schedule + at)))
        if result.reason is not None:
            cell.reasons[place] = result.reason
        keys = {reported_once(each) for each in result.findings if each.cause is None}
        fresh = {key for key in keys if key not in cell.first or place < cell.first[key]}
        is_new = any(key not in cell.first for key in fresh)
        cell.first.update(dict.fromkeys(fresh, place))
        if fresh:  # the others are reported with an earlier batch
            self._failing[place] = result
        return is_new

    def findings(self) -> list[tuple[Finding, ...]]:
        reported = []
        for place, result in sorted(self._failing.items()):
            first = self._cells[result.plan.cell].first
            causes = {each.id for each in result.findings if each.cause is None and first[reported_once(each)] == place}
            if causes:
                reported.append(tuple(each for each in result.findings if (each.cause or each.id) in causes))
        return reported

    def rows(self, *, missing: str | None = None) -> tuple[ScenarioResult, ...]:
        return tuple(self._row(cell, missing) for cell in self._cells.values())

    def _row(self, cell: _CellTally, missing: str | None) -> ScenarioResult:
        covered = self._coverage(cell)
        reason = None if cell.first else self._why_unknown(cell, covered) or missing
        verdict, code = decided(is_failed=bool(cell.first), reason=reason)
        return ScenarioResult(
            id=cell.plan.cell,
            shape=cell.plan.tried_with,
            verdict=verdict,
            code=code,
            reason=reason,
            schedules=cell.evidence.schedules,
            duration_s=round(cell.duration_s, 3),
            evidence=cell.evidence,
            coverage=covered,
        )

    def _coverage(self, cell: _CellTally) -> Coverage:
        within, batches = self._within, cell.wanted
        ran = wanted = cell.evidence.schedules
        if within is None:
            wanted = batches * (self._schedules or 1)
        floor, tried = floor_of(cell.plan, wanted=0), tuple(sorted(cell.tried))
        found = coverage(cell.plan, wanted=min(wanted, ROUND), floor=floor, ran=(), earlier=tried)
        not_tried = [*found.not_tried]
        unit = "seed" if within is None else "workload"
        if left := batches - cell.ended:
            not_tried.append(f"{left:,} of {counted(batches, unit)}")
        if part := cell.ended - cell.whole:
            not_tried.append(f"the rest of {counted(part, unit)} that ended early")
        scope = None if within is None else scope_text(cell.whole, within=within)
        return dataclasses.replace(found, wanted=max(wanted, ran), not_tried=tuple(not_tried), scope=scope)

    def _why_unknown(self, cell: _CellTally, covered: Coverage) -> str | None:
        if cell.reasons:
            return cell.reasons[min(cell.reasons)]
        if why := shortfall(cell.plan, covered, ran=cell.evidence.schedules):
            return f"{why}: use a larger --max-time, --schedules or --seeds"
        if self._within is not None and not cell.whole:
            return "no workload was run whole: use a larger --max-time, or a smaller K of --strategy answers:K"
        return evidence_gap(cell.plan, cell.evidence)
