"""How many schedules a cell runs in the seconds that it has, by a clock that stands still between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from kvcheck.commands.cells import Order, _in_time, run_cell
from kvcheck.core.record import Evidence
from kvcheck.core.stress.engines import EngineRunner
from kvcheck.core.stress.schedule import Plan, parse_line
from kvcheck.core.targets.engines.wire import Reply

PLAN = Plan(scenario="retract-resume", shape="retract.nsa")


@dataclass(slots=True)
class Timed:
    """Stands in for an engine whose schedules take these seconds, the last of them for ever after."""

    takes: tuple[float, ...]
    now: float = 100.0
    runs: int = field(default=0)

    def run(self, plan: Plan) -> Reply:
        """One schedule."""
        assert plan.schedule == self.runs
        self.now += self.takes[min(self.runs, len(self.takes) - 1)]
        self.runs += 1
        return Reply(evidence=Evidence(schedules=1))


@pytest.mark.parametrize(
    ("takes", "limit", "runs"),
    [
        ((1.0,), 3.5, 4),  # 0, 1, 2, and at 3 half of the next is still inside
        ((1.0,), 3.4, 3),
        ((2.0,), 3.0, 2),
        ((9.0,), 1.0, 1),  # the first always runs
        ((9.0, 0.5), 10.0, 3),  # the first warms up, and says nothing of the others
        ((1.0, 9.0, 1.0), 12.0, 2),  # what is expected of the third goes by the second
        ((1.0, 9.0), 2.0, 2),
        ((1.0,), None, 6),
        ((0.0,), 1.0, 6),
    ],
)
def test_cell_begins_what_it_half_ends_in_time(
    takes: tuple[float, ...], limit: float | None, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Timed(takes)
    monkeypatch.setattr("kvcheck.commands.cells.time", SimpleNamespace(monotonic=lambda: engine.now))
    reports = [*run_cell(0, Order(plan=PLAN, schedules=6, max_time_s=limit), installed=cast(EngineRunner, engine))]
    assert engine.runs == runs and len(reports) == runs + 1
    assert reports[-1].evidence is None and [each.duration_s for each in reports[:-1]] == [
        takes[min(at, len(takes) - 1)] for at in range(runs)
    ]


@pytest.mark.parametrize(("seed", "ran"), [(3, 1), (102, 1), (104, 2)])
def test_cell_without_evidence_tries_other_workloads(seed: int, ran: int) -> None:
    """The first workload of the last of these seeds retracts nobody, its second does."""
    plan = Plan(scenario="retract-resume", shape="glm-5.1-tiny", seed=seed)
    reports = [*run_cell(0, Order(plan=plan, schedules=24, max_time_s=1e-6))]
    assert [each.evidence.schedules for each in reports if each.evidence is not None] == [1] * ran
    assert reports[-1].evidence is None and reports[-1].reason is None


@pytest.mark.parametrize(
    ("line", "schedules", "ran"),
    [
        ("retract-resume:shape=glm-5.1-tiny", 24, [0, 8, 16, 24, 32, 40]),
        ("retract-resume:shape=glm-5.1-tiny", 2, [0, 8]),
        ("retract-resume:shape=glm-5.1-tiny,trace=sample", 24, []),
        ("retract-resume:shape=glm-5.1-tiny,schedule=5", 24, [8, 16, 24, 32, 40, 48]),
    ],
)
def test_schedules_beside_the_time_begin_workloads(line: str, schedules: int, ran: list[int]) -> None:
    order = Order(plan=parse_line(line), schedules=schedules, max_time_s=-1.0)
    assert [each.schedule for each, _ in _in_time(order, lambda: True)] == ran
    assert [*_in_time(order)] == []
