"""Cell runners: one schedule of a cell, whatever is under test: one process, ranks as processes, an engine, a device.

Invariants:
- A runner keeps what the schedules of its cell share, such as the workload; it never looks at a clock.
- Whatever `run` has found stays found, also where there is no time left to confirm it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvcheck.commands.orders import Order, Report
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.stress.schedule import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcheck.core.stress.probe_runner import EngineRunner
    from kvcheck.core.stress.ranks.runner import ProcessEngine
    from kvcheck.core.stress.runner import Outcome, StressEngine

UNKNOWNS = 12
"""Schedules without any that could be judged, after which a probe is given up: settings have gone round by then."""
LOSSES = 2
"""Children of an engine that a probe may lose before it is given up."""


class Runner(Protocol):
    """Runs the schedules of one cell."""

    gives_up: bool
    """Further schedules would say nothing new."""

    def run(self, plan: Plan) -> Report:
        """One schedule, judged."""

    def confirm(self, findings: tuple[Finding, ...], may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        """The findings of the last schedule, confirmed where that can be done; may_go_on is asked before each run."""

    def gap(self, total: Evidence) -> str | None:
        """What the cell has not exercised, or None."""

    def closing(self) -> str | None:
        """What is told of the whole cell, or None."""


def runner_of(order: Order, processes: ProcessEngine | None, installed: EngineRunner | None) -> Runner:
    """The runner of a cell. processes: runs ranks that are some. installed: the engine that the plan is about."""
    if order.plan.is_in_processes:
        return _Processes(order.plan, processes)
    if installed is not None:
        return _Probe(installed)
    return _Delayed(order.plan) if order.plan.is_delayed else _Simulated(order)


def engine_of(plan: Plan) -> StressEngine:
    """An engine with what the plan has under test."""
    from kvcheck.core.stress.runner import StressEngine
    from kvcheck.core.targets import TARGETS
    from kvcheck.core.targets.mutants import mutant_target
    from kvcheck.core.targets.target import Target

    target: Target = TARGETS.load(plan.target)() if plan.mutant is None else mutant_target(plan.mutant)
    return StressEngine(target)


def _gap(plan: Plan, total: Evidence) -> str | None:
    from kvcheck.core.stress.runner import evidence_gap

    return evidence_gap(plan, total)


class _Plain:
    """What runners have in common: nothing to confirm, nothing to tell in the end."""

    gives_up = False

    def confirm(self, findings: tuple[Finding, ...], may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        return findings

    def closing(self) -> str | None:
        return None


class _Simulated(_Plain):
    """In this process, on the simulated, eager or cuda backend."""

    def __init__(self, order: Order) -> None:
        self._plan, self._confirms = order.plan, order.confirms
        self._engine = engine_of(order.plan)
        self._last: Outcome | None = None

    def run(self, plan: Plan) -> Report:
        outcome = self._last = self._engine.run(plan)
        return Report(
            findings=outcome.findings,
            evidence=outcome.evidence,
            reason=f"an oracle broke: {outcome.broken_oracles[0]}" if outcome.broken_oracles else None,
            divergence=outcome.divergence,
            note=self._engine.note(plan) if plan.trace is not None else None,
        )

    def confirm(self, findings: tuple[Finding, ...], may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        from kvcheck.core.stress.flip import confirmed

        assert self._last is not None
        return confirmed(self._engine, self._last, may_go_on) if self._confirms else findings

    def gap(self, total: Evidence) -> str | None:
        return _gap(self._plan, total)


class _Delayed(_Plain):
    """On a device under delays: each schedule runs without them and with them, and both are judged."""

    def __init__(self, plan: Plan) -> None:
        from kvcheck.core.stress.delayed import Rates, check_operations

        self._plan, self._rates = plan, Rates()
        self._engine = engine_of(plan)
        check_operations(self._engine, plan)

    def run(self, plan: Plan) -> Report:
        from kvcheck.core.stress.delayed import run_both

        free, held = run_both(self._engine, plan)
        self._rates = self._rates.plus(free, held)
        broken = next(iter((*free.broken_oracles, *held.broken_oracles)), None)
        return Report(
            findings=held.findings or free.findings,
            evidence=held.evidence,
            reason=None if broken is None else f"an oracle broke: {broken}",
        )

    def gap(self, total: Evidence) -> str | None:
        return (self._rates.gap or _gap(self._plan, total)) if total.schedules else None

    def closing(self) -> str | None:
        return f"{self._plan.cell}: {self._rates.text()}"


class _Processes(_Plain):
    """Each schedule runs all ranks once, every one a process."""

    def __init__(self, plan: Plan, processes: ProcessEngine | None) -> None:
        from kvcheck.core.stress.ranks.runner import ProcessEngine

        self._plan, self._engine = plan, processes or ProcessEngine()

    def run(self, plan: Plan) -> Report:
        outcome = self._engine.run(plan)
        return Report(findings=outcome.findings, evidence=outcome.evidence, note=self._engine.note, is_note_told=True)

    def gap(self, total: Evidence) -> str | None:
        return _gap(self._plan, total)


class _Probe(_Plain):
    """Each schedule is asked of the engine's child. One that cannot be judged does not keep others from being asked."""

    def __init__(self, installed: EngineRunner) -> None:
        self._installed, self._before = installed, installed.lost
        self._unknown, self._judged = 0, 0

    def run(self, plan: Plan) -> Report:
        reply = self._installed.run(plan)
        self._unknown += reply.unknown is not None
        self._judged += reply.unknown is None
        self.gives_up = (self._unknown >= UNKNOWNS and not self._judged) or (
            self._installed.lost - self._before >= LOSSES
        )
        return Report(
            findings=reply.findings,
            evidence=reply.evidence,
            reason=reply.unknown,
            note="; ".join(f"{plan.cell}: {note}" for note in reply.notes) or None,
        )

    def gap(self, total: Evidence) -> str | None:
        return None
