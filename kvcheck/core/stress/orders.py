"""Orders: the order of a plan's operations, by name and as a chooser.

    schedule  0      1     2       3      4        5      6       7      8        ...
    order     eager  lazy  random  delay  answers  delay  random  delay  answers  ...

Each cell begins elsewhere in the first three.

Invariants:
- A delay holds lanes that the variant of its schedule uses: those tried least in earlier schedules of the cell, and of
  several, those that fewest variants have.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

from kvcheck.core.cache.backend.simulated import Chooser
from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.stress.plan_scenario import scenario_of, turn_of, variant_of
from kvcheck.core.stress.strategies import FIRST, delay_name, delayed_groups, make_strategy
from kvcheck.core.stress.workload.shapes import shape as shape_named

ALL = "all"
RARE = ("aux", "state", "storage")
"""Groups of lanes that only some variants or shapes use."""
BETWEEN = (ANSWERS, "random")


def order_of(plan: Plan) -> str:
    """The order of a plan: "eager", "lazy", "delay:GROUP" (or "delay:all"), "random" or "answers"."""
    if plan.strategy == "delay":
        return delay_name(delayed_groups(plan.schedule))
    if plan.strategy != "portfolio":
        return plan.strategy
    if plan.schedule < len(FIRST):
        return FIRST[(plan.schedule + turn_of(plan)) % len(FIRST)]
    behind = plan.schedule - len(FIRST)
    if behind % 2:
        return BETWEEN[behind // 2 % len(BETWEEN)]
    cell = dataclasses.replace(plan, schedule=0, choices=None, expect=None, mutant=None)
    return _delays(cell).of(plan.schedule)


def chooser_of(plan: Plan) -> Chooser:
    order = order_of(plan) if plan.strategy == "portfolio" else None
    return make_strategy(plan.strategy, seed=plan.seed, schedule=plan.schedule, choices=plan.choices, order=order)


class _Delays:
    """Delays of the schedules of a cell, by number, worked out up to the highest one that was asked for."""

    def __init__(self, cell: Plan) -> None:
        self._cell, self._scenario, self._shape = cell, scenario_of(cell), shape_named(cell.shape)
        self._delays: list[str] = []
        self._tried: Counter[str] = Counter()

    def of(self, number: int) -> str:
        """The delay of schedule `number`: an even distance behind the FIRST ones."""
        place = (number - len(FIRST)) // 2
        while len(self._delays) <= place:
            at = len(FIRST) + 2 * len(self._delays)
            variant = self._scenario.table.variant(variant_of(dataclasses.replace(self._cell, schedule=at)))
            offered = [*self._scenario.lanes(variant, self._shape), ALL]
            turned = [offered[(each + turn_of(self._cell)) % len(offered)] for each in range(len(offered))]
            turned.sort(key=lambda each: (self._tried[each], each not in RARE))
            self._tried[turned[0]] += 1
            self._delays.append(f"delay:{turned[0]}")
        return self._delays[place]


_delays = cache(_Delays)
