"""Schedules that do not end: a loop that nothing interrupts, and rounds that admit and retract for ever, are hangs."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from rigs.situations import StillEngine

from kvcheck.core.base.errors import Hang
from kvcheck.core.cache.scheduler.request import Request, StepReport
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios.serving import IDLE_ROUNDS, drive
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED
from kvcheck.core.stress.workload.jobs import session_jobs

PLAN = Plan(scenario="hicache", shape="llama-3-tiny", seed=1)


class LoopingScheduler(Scheduler):
    """Looks for room for ever in its third round, and catches what it can meanwhile."""

    def step(self) -> StepReport:
        while self._round >= 2:
            try:
                sum(range(100))
            except Exception:  # what a target does
                continue
        return super().step()


@pytest.mark.schedules
def test_a_loop_without_progress_is_a_hang_with_its_line() -> None:
    target = BuiltinTarget(replace(FIXED, scheduler=LoopingScheduler))
    one, other = (ScheduleRunner(target, stuck_cpu_s=limit).run(PLAN) for limit in (0.2, 0.3))
    (finding, *_) = [each for each in one.findings if each.code == "KV901"]
    assert "endless loop" in finding.message and "hicache:shape=llama-3-tiny" in finding.replay
    assert [each.code for each in one.findings] == [each.code for each in other.findings]
    assert one.evidence == other.evidence, "whenever it is interrupted, the same has happened"
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.schedules
def test_a_schedule_that_goes_on_is_never_interrupted() -> None:
    runner = ScheduleRunner(BuiltinTarget(), stuck_cpu_s=0.02)
    runner.workloads.of(PLAN)  # the reference run is not watched
    usual = ScheduleRunner(BuiltinTarget()).run(PLAN)
    watched = runner.run(PLAN)
    assert watched.findings == usual.findings == () and watched.digest == usual.digest


class RestlessEngine(StillEngine):
    """Admits a request in every round and never ends one."""

    rounds = 0

    def submit(self, request: Request) -> None:
        pass

    def step(self) -> StepReport:
        self.rounds += 1
        return StepReport(admitted=[0], retracted=[0])


def test_rounds_that_admit_and_retract_for_ever_are_a_hang() -> None:
    engine = RestlessEngine(())
    jobs = session_jobs(16, 96, requests=1, sessions=1, seed=1)
    with pytest.raises(Hang, match="no request finished or failed in"):
        drive(engine, jobs, lambda event: None, hurry=1)
    assert IDLE_ROUNDS < engine.rounds < IDLE_ROUNDS + 1000
