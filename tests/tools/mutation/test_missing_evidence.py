"""An edit that takes evidence away is unknown: decided by the schedules that were surveyed on the code as it is."""

from __future__ import annotations

import dataclasses

import pytest

from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from tools.mutation import trial

CELL = "hicache/llama-3-tiny"
FIRST = Plan(scenario="hicache", shape="llama-3-tiny")
TRACED = 4


def loads(number: int) -> Evidence:
    return Evidence(schedules=1, loads=number)


class FixedRunner:
    """Schedules with so many loads each; a schedule below 0 loads fails. What has no load is a gap."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.ran: list[int] = []

    def run(self, plan: Plan) -> Outcome:
        self.ran.append(plan.schedule)
        count = self.rows[plan.schedule]
        finding = Finding(code="KV102", oracle="content", message="", scenario="", shape="", schedule="", replay="")
        return Outcome(plan=plan, findings=(finding,) if count < 0 else (), evidence=loads(max(0, count)), digest=0)

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return None if total.loads else "nothing was loaded"


def judged(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], usual: list[int], *, numbers: list[int], budget: int
) -> tuple[str, list[int]]:
    """The outcome, and the schedules that ran. budget: schedules that the CPU time is enough for."""
    runner = FixedRunner(rows)
    monkeypatch.setattr(trial, "ScheduleRunner", lambda *args, **kwargs: runner)
    monkeypatch.setattr(trial.time, "process_time", lambda: 0.0 if len(runner.ran) < budget else 99.0)
    runs = [(dataclasses.replace(FIRST, schedule=number).line(), 5.0) for number in numbers]
    cells = {CELL: {"evidence": [to_plain(loads(each)) for each in usual]}}
    said: list[dict[str, object]] = []
    trial.judge(said.append, runs=runs, cells=cells, cpu_s=10.0, stuck_cpu_s=1.0)
    return str(said[-1]["outcome"]), runner.ran


def test_evidence_that_the_code_as_it_is_has_and_the_edit_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, [0] * 6, [1, 1, 1, 1], numbers=[0, 1, 2, 3, 4, 5], budget=1)
    assert found == ("unknown", [0, 1, 2, 3]), "all that were surveyed run before it is said"


def test_evidence_that_comes_later_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0, 0, 2, 0], [1, 1, 1, 1], numbers=[0, 1, 2, 3], budget=1)[0] == "survived"


def test_evidence_that_is_usually_missing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0] * 4, [0, 0, 0, 1], numbers=[0, 1, 2, 3], budget=2) == ("survived", [0, 1])
    assert judged(monkeypatch, [0] * 4, [0] * 4, numbers=[0, 1, 2, 3], budget=9)[0] == "survived"


def test_schedules_that_miss_the_edit_keep_their_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [9, 0, 9, 0], [1, 1, 1, 1], numbers=[1, 3], budget=9) == ("survived", [1, 3])


def test_a_finding_on_the_way_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0, 0, -1, 0], [1, 1, 1, 1], numbers=[0, 1, 2, 3], budget=1) == ("killed", [0, 1, 2])
