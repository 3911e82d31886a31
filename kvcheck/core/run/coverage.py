"""Coverage: how many of the wanted schedules a cell has run, what they tried, and whether that is enough for a pass.

What is tried has a name: "eager", "lazy", "random", "answers", "audit of footprints", or "kind:value" such as
"delay:d2h" or "rank layout:2x1".

Invariants:
- A cell below its floor is no pass, for whatever reason it ended.
- All that the scenario has settings for, and all orders of a full round, are named if they were not tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Coverage
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import row_of

ROUND = 24
"""So many schedules try every order at least once, and every setting."""


def floor_of(plan: Plan, *, wanted: int, least: int | None = None) -> int:
    """How many schedules a pass needs. least: how many the user asks for; it can only raise the floor.

    A trace is one workload, and processes run in an order that the machine decides. So one schedule is enough for both.
    A mutant has to be found, so all of its schedules have to run.
    """
    usual = 1 if plan.trace is not None else row_of(plan).floor
    if plan.mutant is not None:
        usual = wanted
    return max(usual, least or 0)


def tried_by(plan: Plan) -> tuple[str, ...]:
    """What one schedule tries: its order, the settings that its number picks, and the audit where it has its turn. A
    probe of an engine tries none."""
    return row_of(plan).tried(plan)


def coverage(plan: Plan, *, wanted: int, floor: int, ran: Collection[int], earlier: tuple[str, ...] = ()) -> Coverage:
    """The coverage of the cell that begins with `plan`.

    ran: numbers of the schedules that have run to their end. earlier: what was tried before those.
    """
    planned = range(plan.schedule, plan.schedule + max(wanted, ROUND))
    tried = [*dict.fromkeys((*earlier, *_names(plan, sorted(ran))))]
    row = row_of(plan)
    left = [name for name in (*_names(plan, planned), *row.settings(plan)) if name not in tried]
    return Coverage(
        wanted=wanted, floor=floor, tried=tuple(tried), not_tried=(*dict.fromkeys(left), *row.left_out(plan))
    )


def shortfall(plan: Plan, found: Coverage, *, ran: int) -> str | None:
    """Why so many schedules are too few for a pass; None if they are enough."""
    if ran < found.floor:
        return f"{ran} of {counted(found.wanted, 'schedule')} ran, and a pass takes {found.floor}"
    lack = row_of(plan).lacks(plan, found)
    return lack and f"{ran} of {counted(found.wanted, 'schedule')} ran, and {lack}"


def _names(plan: Plan, numbers: Iterable[int]) -> list[str]:
    """What these schedules try: each name once, in the order of the schedules."""
    return [*dict.fromkeys(name for at in numbers for name in tried_by(dataclasses.replace(plan, schedule=at)))]
