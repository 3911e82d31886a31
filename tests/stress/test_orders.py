"""Which order a schedule runs in: the first three soon, then delays of lanes that its variant uses, and random between.

Invariants:
- The name that is told is the order that runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcheck.core.stress.orders import chooser_of, order_of
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.runner_rows import RUNNERS
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.schedule import Kind, Plan
from kvcheck.core.stress.strategies import FIRST, LANE_GROUPS, DelayStrategy, delay_name
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.workload.events import Event, Submitted
from kvcheck.core.workload.shapes import shape as shape_named

CELLS = RUNNERS[Kind.SCHEDULE].cells(Plan(scenario=""), (), ())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.cell)
def test_a_cell_tries_the_first_orders_and_then_each_delay_of_its_lanes(cell: Plan) -> None:
    orders = [order_of(replace(cell, schedule=number)) for number in range(24)]
    assert {*orders[:3]} == {*FIRST}
    assert {*orders[4::2]} == {"random"}
    delays = Counter(orders[3::2])
    assert all(name.startswith("delay:") for name in delays) and "delay:all" in delays
    assert {"delay:compute", "delay:d2h", "delay:h2d"} <= {*delays}
    for number, order in enumerate(orders):
        made = chooser_of(replace(cell, schedule=number))
        assert not isinstance(made, DelayStrategy) or delay_name(made.groups) == order


def test_lanes_that_few_variants_have_are_delayed_where_they_are() -> None:
    """Nothing else finds a seal that leaves out the metadata row: it needs the row's own lane, and that lane late."""
    cell = Plan(scenario="nvlink-aux", shape="llama-3-tiny")
    table = SCENARIOS.load(cell.scenario)().table
    plans = [replace(cell, schedule=number) for number in range(3, 24, 2)]
    ways = Counter((table.variant(plan.variant)["metadata path"], order_of(plan)) for plan in plans)
    assert ways["async", "delay:aux"] >= 1
    assert not ways["messages", "delay:aux"] and not ways["ordered", "delay:aux"]


def test_a_later_schedule_has_the_order_that_a_whole_run_gives_it() -> None:
    cell = Plan(scenario="hicache", shape="llama-3-tiny", seed=4)
    assert order_of(replace(cell, schedule=301)) == [order_of(replace(cell, schedule=at)) for at in range(302)][301]
    assert order_of(replace(cell, schedule=301, mutant="load-without-pin")) == order_of(replace(cell, schedule=301))


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("scenario", "shape"),
    [
        ("retract-resume", "llama-3-tiny"),
        ("hicache", "llama-3-tiny"),
        ("pd-transfer", "qwen3-next-tiny"),
        ("nvlink-aux", "gpt-oss-tiny"),
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
        said |= {*made.lanes(made.table.variant(plan.variant), shape_named(shape))}
        used |= {group for group, starts in LANE_GROUPS.items() if any(lane.startswith(starts) for lane in lanes)}
        assert used <= said
    assert used == said
