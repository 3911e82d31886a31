"""Cell: one scenario with its shape or options during a run, counted in schedules or in rounds, and its verdict.

Invariants:
- A finding fails a cell, any reason against a pass leaves it UNKNOWN, all else is a PASS.
- A cell that has run enough for a pass is a PASS, whatever ends it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import STOPPED, Coverage, Evidence, Finding, ScenarioResult, Verdict
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import row_of
from kvcheck.core.run.turns import Report

NOT_EXERCISED = "KV990"
ROUND = 24
"""So many schedules try every order and every setting at least once."""


def decided(*, is_failed: bool, reason: str | None) -> tuple[Verdict, str | None]:
    if is_failed:
        return Verdict.FAIL, None
    return (Verdict.PASS, None) if reason is None else (Verdict.UNKNOWN, NOT_EXERCISED)


class CellPlan(Protocol):
    """cell: the id of its row. tried_with: the shape, probe or engine in it."""

    @property
    def cell(self) -> str: ...

    @property
    def tried_with(self) -> str: ...


P = TypeVar("P", bound=CellPlan)


@dataclass(slots=True, kw_only=True)
class Cell(ABC, Generic[P]):
    """floor: schedules or rounds for a pass. findings: those that fail it. reason: why it is no pass."""

    plan: P
    wanted: int
    floor: int = 1
    evidence: Evidence = field(default_factory=Evidence)
    findings: int = 0
    duration_s: float = 0.0
    reason: str | None = None

    @property
    def id(self) -> str:
        return self.plan.cell

    @abstractmethod
    def lacks(self) -> str | None:
        """Return why it is no pass, apart from findings, or None."""

    def beside(self) -> str | None:
        return None

    @abstractmethod
    def coverage(self) -> Coverage: ...

    def total(self) -> Evidence:
        return self.evidence

    def result(self) -> ScenarioResult:
        reason = self.beside() if self.findings else self.lacks()
        verdict, code = decided(is_failed=self.findings > 0, reason=reason)
        evidence = self.total()
        return ScenarioResult(
            id=self.id,
            shape=self.plan.tried_with,
            verdict=verdict,
            code=code,
            reason=reason,
            schedules=evidence.schedules,
            duration_s=round(self.duration_s, 3),
            evidence=evidence,
            coverage=self.coverage(),
        )


@dataclass(slots=True, kw_only=True)
class ScheduleCell(Cell[Plan]):
    """ran: numbers of completed schedules. earlier: names tried by an interrupted run. is_exercised: all events of a
    pass have happened. within: run all schedules within so many answers, of `wanted` workloads. scope: the schedules
    explored completely."""

    fails_on_conditional: bool = False
    ran: list[int] = field(default_factory=list)
    earlier: tuple[str, ...] = ()
    is_done: bool = False
    is_exercised: bool = False
    told: int | None = None
    notes: list[str] = field(default_factory=list)
    within: int | None = None
    scope: str | None = None
    _coverage: tuple[int, Coverage] | None = None

    @property
    def is_enough(self) -> bool:
        return self.is_exercised and self.shortfall(None) is None

    def take(self, report: Report) -> None:
        if report.evidence is None:
            self.is_done, self.scope = True, report.scope
            self.reason = self.reason or self.shortfall(report.cut) or report.reason
            return
        self.reason = self.reason or report.reason
        if report.schedule not in self.ran:
            self.ran.append(report.schedule)
        self.is_exercised = report.gap is None
        self.add(report.findings, report.evidence, report.duration_s)

    def add(self, findings: tuple[Finding, ...], evidence: Evidence, duration_s: float) -> None:
        self.evidence = self.evidence.plus(evidence)
        self.duration_s += duration_s
        self.findings += sum(each.condition is None or self.fails_on_conditional for each in findings)

    def take_over(self, row: ScenarioResult, findings: int) -> None:
        """Continue an interrupted run: an unjudged cell starts anew, a pass with schedules left goes on."""
        if row.verdict is Verdict.UNKNOWN and (row.reason != STOPPED or self.within is not None):
            return
        self.evidence, self.duration_s = row.evidence, row.duration_s
        if row.coverage is not None:
            self.earlier, self.scope = row.coverage.tried, row.coverage.scope
        self.findings = max(1, findings) if row.verdict is Verdict.FAIL else 0
        self.is_exercised = row.verdict is Verdict.PASS
        is_whole = self.within is not None or row.schedules >= self.wanted
        self.is_done = row.verdict is Verdict.FAIL or (self.is_enough and is_whole)

    def coverage(self) -> Coverage:
        if self._coverage is None or self._coverage[0] != len(self.ran):
            found = coverage(self.plan, wanted=self.wanted, floor=self.floor, ran=self.ran, earlier=self.earlier)
            self._coverage = len(self.ran), found
        if self.within is None:
            return self._coverage[1]
        return replace(self._coverage[1], wanted=max(self.wanted, self.evidence.schedules), scope=self.scope)

    def shortfall(self, cut: str | None) -> str | None:
        if self.findings:
            return None
        why = shortfall(self.plan, self.coverage(), ran=self.evidence.schedules)
        if cut is None and self.wanted < self.floor:
            cut = f"use --schedules {self.floor} or more"
        return why and f"{why}: {cut or 'its time was up; use a larger --max-time'}"

    def lacks(self) -> str | None:
        if self.reason:
            return self.reason
        if not (self.is_done or self.is_enough):
            return STOPPED
        return None if self.evidence.schedules else "nothing was judged"

    def beside(self) -> str | None:
        return f"it fails, and not all of it was judged: {self.reason}" if self.reason else None


def floor_of(plan: Plan, *, wanted: int, least: int | None = None) -> int:
    """Schedules for a pass: one of a trace and of processes, whose order the machine decides; all of a mutant. least:
    can only raise it."""
    usual = 1 if plan.trace is not None else row_of(plan).floor
    if plan.mutant is not None:
        usual = wanted
    return max(usual, least or 0)


def tried_by(plan: Plan) -> tuple[str, ...]:
    return row_of(plan).tried(plan)


def coverage(plan: Plan, *, wanted: int, floor: int, ran: Collection[int], earlier: tuple[str, ...] = ()) -> Coverage:
    planned = range(plan.schedule, plan.schedule + max(wanted, ROUND))
    tried = [*dict.fromkeys((*earlier, *_names(plan, sorted(ran))))]
    row = row_of(plan)
    left = [name for name in (*_names(plan, planned), *row.settings(plan)) if name not in tried]
    return Coverage(
        wanted=wanted, floor=floor, tried=tuple(tried), not_tried=(*dict.fromkeys(left), *row.left_out(plan))
    )


def shortfall(plan: Plan, found: Coverage, *, ran: int) -> str | None:
    if ran < found.floor:
        return f"{ran} of {counted(found.wanted, 'schedule')} ran, and a pass takes {found.floor}"
    lack = row_of(plan).lacks(plan, found)
    return lack and f"{ran} of {counted(found.wanted, 'schedule')} ran, and {lack}"


def _names(plan: Plan, numbers: Iterable[int]) -> list[str]:
    return [*dict.fromkeys(name for at in numbers for name in tried_by(dataclasses.replace(plan, schedule=at)))]
