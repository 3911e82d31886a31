"""How cells take turns, by a clock that moves only while a schedule runs, and what ends them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvcheck.commands.targets import target_of
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import (
    BARREN,
    ROUNDS_OF_SMALL,
    UNKNOWNS,
    WEIGHT,
    Budget,
    CellTask,
    Limit,
    Report,
    Turns,
    due,
    run_cell,
    take_turns,
)
from kvcheck.core.run.workers import tasks_text, work

PLAN = Plan(scenario="retract-resume", probe="retract.nsa", target="sglang")
FINDING = Finding(code="KV102", oracle="content", message="foreign bytes")
CALL = replace(FINDING, code="KV308", oracle="liveness", message="a save: expected DoubleFree")


@dataclass(slots=True)
class Clock:
    """Wall time and CPU time, which moves at a share of it."""

    now: float = 100.0
    share: float = 1.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now * self.share


@dataclass(slots=True)
class Timed:
    """Stands in for a runner whose schedules take these seconds, the last of them for ever after."""

    clock: Clock
    takes: tuple[float, ...]
    fails_at: int | None = None
    is_poor: bool = False
    ran: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    finding: Finding = FINDING
    cpu_s: float = 0.0
    traces: tuple[int, ...] = (0,)

    def run(self, plan: Plan) -> Outcome:
        self.clock.now += self.takes[min(len(self.ran), len(self.takes) - 1)]
        self.ran.append(plan.schedule)
        self.log.append(f"{plan.probe or plan.shape} {plan.schedule}")
        trace = self.traces[min(len(self.ran), len(self.traces)) - 1]
        findings = (self.finding,) if plan.schedule == self.fails_at else ()
        return Outcome(plan=plan, evidence=Evidence(schedules=1), findings=findings, digest=0, trace=trace)

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return "nothing was retracted" if self.is_poor else None

    def closing(self) -> str | None:
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that cells look at."""
    made = Clock()
    monkeypatch.setattr("kvcheck.core.run.turns.time", made)
    monkeypatch.setattr("kvcheck.core.base.deadline.time", made)
    return made


def until_closed(*cells: Turns) -> list[Report]:
    """All cells in turn, as take_turns runs them."""
    reports: list[Report] = []
    while still_open := [cell for cell in cells if cell.is_open]:
        for cell in due(still_open):
            reports += [*cell.turn()]
    return reports


def ran(clock: Clock, runner: Timed, limit: Limit | None = None, **task: Any) -> list[Report]:
    """The reports of one cell of six schedules."""
    budget = Budget(limit or Limit(), clock.process_time)
    return until_closed(Turns(0, CellTask(**{"plan": PLAN, "schedules": 6, **task}), budget, runner))


@pytest.mark.parametrize(
    ("takes", "floor", "limit", "runs"),
    [
        ((1.0,), 0, 3.5, 4),  # 0, 1, 2, and at 3 half of the next is still inside
        ((1.0,), 0, 3.4, 3),
        ((2.0,), 0, 3.0, 2),
        ((9.0,), 3, 1.0, 3),  # the floor runs whatever it costs
        ((9.0,), 5, 1.0, 5),
        ((9.0,), 8, 1.0, 6),  # but never more than was asked for
        ((1.0, 9.0, 1.0), 1, 12.0, 2),  # what is expected of the third goes by the second
        ((1.0,), 3, None, 6),
        ((0.0,), 3, 1.0, 6),
    ],
)
def test_cell_runs_its_floor_and_then_what_half_fits(
    takes: tuple[float, ...], floor: int, limit: float | None, runs: int, clock: Clock
) -> None:
    runner = Timed(clock, takes)
    reports = ran(clock, runner, Limit(cpu_s=limit), floor=floor)
    assert runner.ran == [*range(runs)]
    assert [each.schedule for each in reports[:-1]] == runner.ran and reports[-1].evidence is None
    assert [each.duration_s for each in reports[:-1]] == [takes[min(at, len(takes) - 1)] for at in range(runs)]


def test_a_busy_machine_runs_as_many_schedules(clock: Clock) -> None:
    clock.share = 0.1  # nine of ten seconds belong to others
    runner = Timed(clock, (10.0,))
    ran(clock, runner, Limit(cpu_s=6.0), schedules=24, floor=3)
    assert runner.ran == [*range(6)]


def test_cells_take_turns_by_the_number_of_the_schedule(clock: Clock) -> None:
    log: list[str] = []
    budget = Budget(Limit(), clock.process_time)
    cells = [
        Turns(at, CellTask(plan=replace(PLAN, probe=name), schedules=2), budget, Timed(clock, (1.0,), log=log))
        for at, name in enumerate("abc")
    ]
    until_closed(*cells)
    assert log == ["a 0", "b 0", "c 0", "a 1", "b 1", "c 1"]


SIZES = {"llama-3-micro": 1.0, "llama-3-tiny": 1.0}


def cells_of_both_sizes(clock: Clock, log: list[str], limit: Limit, *, floor: int) -> list[Turns]:
    """A micro and a tiny cell, whose schedules take equally long."""
    budget = Budget(limit, clock.process_time)
    plans = [Plan(scenario="retract-resume", shape=name) for name in SIZES]
    return [
        Turns(at, CellTask(plan=plan, schedules=40, floor=floor), budget, Timed(clock, (SIZES[plan.shape],), log=log))
        for at, plan in enumerate(plans)
    ]


def test_up_to_the_floors_micro_rounds_come_before_each_of_the_others(clock: Clock) -> None:
    log: list[str] = []
    until_closed(*cells_of_both_sizes(clock, log, Limit(cpu_s=9.0), floor=3))
    sizes = [each.split()[0].rpartition("-")[2] for each in log]
    assert sizes[:ROUNDS_OF_SMALL] == ["micro"] * ROUNDS_OF_SMALL
    third = [at for at, size in enumerate(sizes) if size == "tiny"][2]
    assert sizes[: third + 1].count("micro") == 3 * ROUNDS_OF_SMALL + 1, "it is there before the time is up"


def test_behind_the_floors_a_second_of_a_tiny_cell_counts_as_several_of_a_micro_one(clock: Clock) -> None:
    log: list[str] = []
    until_closed(*cells_of_both_sizes(clock, log, Limit(cpu_s=30.0), floor=1))
    ran = {name: sum(each.startswith(name) for each in log) for name in SIZES}
    assert ran["llama-3-micro"] / ran["llama-3-tiny"] == pytest.approx(WEIGHT, rel=0.2)


def test_floors_of_tiny_cells_run_when_micro_ones_have_used_the_time(clock: Clock) -> None:
    log: list[str] = []
    until_closed(*cells_of_both_sizes(clock, log, Limit(cpu_s=1.0), floor=3))
    assert sorted(log) == [f"{name} {number}" for name in sorted(SIZES) for number in range(3)]


@pytest.mark.parametrize(
    ("traces", "count"), [((1, 2, 2), 2 + BARREN), ((*range(1, 40),), 39), ((1,) * BARREN, 1 + BARREN)]
)
def test_a_trace_file_ends_when_its_schedules_bring_nothing_new(
    traces: tuple[int, ...], count: int, clock: Clock
) -> None:
    runner = Timed(clock, (1.0,), traces=traces)
    plan = Plan(scenario="retract-resume", shape="llama-3-tiny", trace="sample", strategy="random")
    *reports, end = ran(clock, runner, plan=plan, schedules=39, floor=1)
    assert len(reports) == count
    assert end.reason is None and (end.note or "").endswith("brought no new host trace") == (count < 39)
    assert sum(each.evidence.traces or 0 for each in reports if each.evidence is not None) == len({*traces})


def test_after_their_floors_cells_get_equal_time_and_not_equally_many_schedules(clock: Clock) -> None:
    log: list[str] = []
    budget = Budget(Limit(cpu_s=24.0), clock.process_time)
    cells = [
        Turns(
            at, CellTask(plan=replace(PLAN, probe=name), schedules=24, floor=2), budget, Timed(clock, (cost,), log=log)
        )
        for at, (name, cost) in enumerate({"dear": 4.0, "cheap": 1.0}.items())
    ]
    until_closed(*cells)
    assert log[:4] == ["dear 0", "cheap 0", "dear 1", "cheap 1"], "first the floors of all"
    assert log.count("dear 2") == 1 and sum(each.startswith("cheap") for each in log) >= 8


def test_limit_of_wall_time_ends_a_cell_below_its_floor(clock: Clock) -> None:
    runner = Timed(clock, (4.0,))
    reports = ran(clock, runner, Limit(until=clock.now + 7), floor=3)
    assert runner.ran == [0, 1] and reports[-1].evidence is None


@pytest.mark.schedules
def test_limit_of_wall_time_cuts_a_schedule_and_names_its_cost() -> None:
    plan = Plan(scenario="retract-resume", shape="llama-3-8b", requests=100_000)
    began = time.monotonic()
    reports = [*take_turns([(0, CellTask(plan=plan, schedules=24, floor=3))], Limit(until=began + 1.0), target_of)]
    assert time.monotonic() - began < 10
    (end,) = reports
    assert end.cut is not None and "schedule 0 after" in end.cut
    assert "100,000 requests, 131,072 bytes of KV a token" in end.cut  # 32 layers, 8 heads of 128, K and V in two bytes


def test_cell_ends_with_its_first_failing_schedule(clock: Clock) -> None:
    runner = Timed(clock, (1.0,), fails_at=2)
    reports = ran(clock, runner)
    assert runner.ran == [0, 1, 2] and reports[-2].findings == (FINDING,)


@pytest.mark.parametrize(("fails", "runs"), [(False, 6), (True, 3)])
def test_conditional_finding_ends_a_cell_only_where_asked(fails: bool, runs: int, clock: Clock) -> None:
    runner = Timed(clock, (1.0,), fails_at=2, finding=replace(FINDING, condition="peers of other releases"))
    reports = ran(clock, runner, fails_on_conditional=fails)
    assert len(runner.ran) == runs and sum(len(each.findings) for each in reports) == 1


@pytest.mark.parametrize(("floor", "runs"), [(1, 3), (3, 3), (5, 5), (9, 6)])
def test_a_call_that_went_wrong_ends_a_cell_once_a_pass_could_have_been_given(
    floor: int, runs: int, clock: Clock
) -> None:
    """What it is about may show in a later schedule, and is the better finding then."""
    runner = Timed(clock, (1.0,), fails_at=2, finding=CALL)
    reports = ran(clock, runner, floor=floor)
    assert len(runner.ran) == runs and [each for report in reports for each in report.findings] == [CALL]


def test_a_call_that_went_wrong_is_reported_once_and_another_finding_ends_the_cell(clock: Clock) -> None:
    class Scripted(Timed):
        def run(self, plan: Plan) -> Outcome:
            found = {0: (CALL,), 1: (CALL,), 2: (replace(CALL, message="a restore: expected it"), FINDING)}
            return replace(super().run(plan), findings=found.get(plan.schedule, ()))

    runner = Scripted(clock, (1.0,))
    reports = ran(clock, runner, floor=5)
    assert runner.ran == [0, 1, 2]
    assert [each.code for report in reports for each in report.findings] == ["KV308", "KV308", FINDING.code]


def test_interrupted_cell_goes_on_behind_what_was_judged(clock: Clock) -> None:
    runner = Timed(clock, (1.0,))
    ran(clock, runner, floor=3, before=Evidence(schedules=4))
    assert runner.ran == [4, 5]


@pytest.mark.parametrize(
    ("line", "schedules", "numbers"),
    [
        ("retract-resume:shape=glm-5.1-tiny", 24, [0, 1, 2, 3, 4, 5, 6]),
        ("retract-resume:shape=glm-5.1-tiny", 3, [0, 1, 2]),
        ("retract-resume:shape=glm-5.1-tiny,trace=sample", 24, [0]),
        ("retract-resume:shape=glm-5.1-tiny,schedule=5", 24, [5, 6, 7, 8, 9, 10, 11]),
    ],
)
def test_cell_without_evidence_begins_further_workloads(
    line: str, schedules: int, numbers: list[int], clock: Clock
) -> None:
    runner = Timed(clock, (1.0,), is_poor=True)
    reports = ran(clock, runner, Limit(cpu_s=0.5), plan=parse_line(line), schedules=schedules)
    assert runner.ran == numbers and reports[-1].reason == "nothing was retracted"


@pytest.mark.schedules
def test_tasks_survive_the_pipe() -> None:
    plan = parse_line("retract-resume:shape=llama-3-tiny,seed=3")
    task = CellTask(plan=plan, schedules=2, floor=1, before=Evidence(schedules=1, retractions=5))
    begun: list[str] = []
    lines = [*work(tasks_text([(7, task)], Limit(cpu_s=1e9)), target_of, begun.append)]
    assert [('"cell": 7' in line, '"schedule": 1' in line) for line in lines[:1]] == [(True, True)]
    assert len(lines) == 2


@dataclass(slots=True)
class Answers(Timed):
    """answers: by schedule, why it is no evidence, or a finding; else judged."""

    answers: dict[int, str | Finding] = field(default_factory=dict)

    def run(self, plan: Plan) -> Outcome:
        ran = Timed.run(self, plan)
        answer = self.answers.get(plan.schedule)
        if isinstance(answer, Finding):
            return replace(ran, findings=(answer,))
        return replace(ran, unknown=answer, is_lost=answer == "lost")


@pytest.mark.parametrize(
    ("answers", "asked_for"),
    [
        ({0: "no load was asked for", 1: FINDING}, [0, 1]),  # the first schedule could not be judged, and hides nothing
        (dict.fromkeys(range(24), "this release has no trees"), [*range(UNKNOWNS)]),
        ({0: "lost", 1: "lost"}, [0, 1]),
        ({5: "no load was asked for"}, [*range(24)]),
    ],
)
def test_probe_goes_on_behind_a_schedule_that_cannot_be_judged(
    answers: dict[int, str | Finding], asked_for: list[int]
) -> None:
    engine = Answers(Clock(), (1.0,), answers=answers)
    reports = [*run_cell(0, CellTask(plan=PLAN, schedules=24), target_of, engine)]
    assert engine.ran == asked_for
    assert any(each.reason for each in reports) and any(each.findings for each in reports) == (
        1 in answers and answers[1] is FINDING
    )
