"""Which order a schedule runs in: the first three soon, then delays of lanes, and answers and random ones between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.events import Event
from kvcheck.core.run.plan import ANSWERS, Plan, parse_line
from kvcheck.core.stress.answers import AnswersStrategy
from kvcheck.core.stress.orders import chooser_of, order_of
from kvcheck.core.stress.plan_scenario import variant_of
from kvcheck.core.stress.rows import SCHEDULE
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.strategies import (
    FIRST,
    LANE_GROUPS,
    DelayStrategy,
    EagerStrategy,
    LazyStrategy,
    RandomStrategy,
    delay_name,
)
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import mutant_target
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES, TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named

KINDS = {"eager": EagerStrategy, "lazy": LazyStrategy, "random": RandomStrategy, ANSWERS: AnswersStrategy}
CELLS = SCHEDULE.cells(Plan(scenario=""), (), ())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.cell)
def test_a_cell_tries_the_first_orders_and_then_each_delay_of_its_lanes(cell: Plan) -> None:
    orders = [order_of(replace(cell, schedule=number)) for number in range(24)]
    assert {*orders[:3]} == {*FIRST}
    assert {*orders[4::4]} == {"answers"} and {*orders[6::4]} == {"random"}
    delays = Counter(orders[3::2])
    assert all(name.startswith("delay:") for name in delays) and "delay:all" in delays
    assert {"delay:compute", "delay:d2h", "delay:h2d"} <= {*delays}
    for number, order in enumerate(orders):
        made = chooser_of(replace(cell, schedule=number))
        assert KINDS.get(order, DelayStrategy) is type(made)
        assert not isinstance(made, DelayStrategy) or delay_name(made.groups) == order


def test_lanes_that_few_variants_have_are_delayed_where_they_are() -> None:
    """Nothing else finds a seal that leaves out the metadata row: it needs the row's own lane, and that lane late."""
    cell = Plan(scenario="nvlink-aux", shape="llama-3-tiny")
    table = SCENARIOS.load(cell.scenario)().table
    plans = [replace(cell, schedule=number) for number in range(3, 24, 2)]
    ways = Counter((table.variant(variant_of(plan))["metadata path"], order_of(plan)) for plan in plans)
    assert ways["async", "delay:aux"] >= 1
    assert not ways["messages", "delay:aux"] and not ways["ordered", "delay:aux"]


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("scenario", "shape"),
    [
        ("retract-resume", "llama-3-micro"),
        ("hicache", "llama-3-micro"),
        ("pd-transfer", "qwen3-next-micro"),
        ("nvlink-aux", "gpt-oss-micro"),
    ],
)
def test_the_lanes_of_a_variant_are_those_that_a_run_submits_to(scenario: str, shape: str) -> None:
    lanes: set[str] = set()

    def note(event: Event) -> None:
        assert isinstance(event, Submitted)
        lanes.add(event.lane.rpartition(":")[2])

    used, said = set(), set()
    for number in range(3):
        plan = Plan(scenario=scenario, shape=shape, schedule=number)
        lanes.clear()
        ScheduleRunner(BuiltinTarget()).run(plan, handlers=((Submitted, note),))
        made = SCENARIOS.load(scenario)()
        said |= {*made.lanes(made.table.variant(variant_of(plan)), shape_named(shape))}
        used |= {group for group, starts in LANE_GROUPS.items() if any(lane.startswith(starts) for lane in lanes)}
        assert used <= said
    assert used == said


@pytest.mark.schedules
def test_the_line_of_an_answers_schedule_of_the_portfolio_names_its_answers() -> None:
    plan = Plan(scenario="hicache", shape="glm-5.1-micro", schedule=4, mutant="backup-without-eviction")
    assert order_of(plan) == ANSWERS
    runner = ScheduleRunner(mutant_target("backup-without-eviction"))
    outcome = runner.run(plan)
    lines = {each.schedule for each in outcome.findings}
    (line,) = {parse_line(each or "").line() for each in lines}
    again = runner.run(parse_line(line))
    assert parse_line(line).strategy == ANSWERS
    assert (again.trace, again.refused, again.divergence) == (outcome.trace, outcome.refused, None)
    assert [each.message for each in again.findings] == [each.message for each in outcome.findings]


def test_a_run_that_names_no_shape_has_both_sizes_where_schedules_are_chosen() -> None:
    assert {each.shape for each in CELLS} == {*MICRO_SHAPES, *TINY_SHAPES}
    answering = SCHEDULE.cells(Plan(scenario="", strategy=ANSWERS), (), ())
    assert {each.shape for each in answering} == {*MICRO_SHAPES}
    for base in (Plan(scenario="", trace="sample"), Plan(scenario="", backend="cuda", device="cuda")):
        assert {each.shape for each in SCHEDULE.cells(base, (), ())} == {*TINY_SHAPES}


def test_a_late_schedule_has_its_order_without_those_before_it_having_run() -> None:
    cell = Plan(scenario="retract-resume", shape="llama-3-micro", seed=93)
    assert order_of(replace(cell, schedule=60_003)).startswith("delay:")
