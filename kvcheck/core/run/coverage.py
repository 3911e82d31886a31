"""Coverage: a cell's schedules, orders and settings, and whether they suffice for a pass.

Names are "eager", "lazy", "random", "answers", "audit of footprints", or "kind:value" such as "delay:d2h" or "rank
layout:2x1".

Invariants:
- A cell below its floor is no pass, for whatever reason it ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Coverage
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.runners import row_of

ROUND = 24
"""So many schedules try every order and every setting at least once."""


def floor_of(plan: Plan, *, wanted: int, least: int | None = None) -> int:
    """Number of schedules that a pass needs: one of a trace, which is one workload, and of processes, whose order the
    machine decides; all of a mutant. least: the user's own number, which can only raise the floor."""
    usual = 1 if plan.trace is not None else row_of(plan).floor
    if plan.mutant is not None:
        usual = wanted
    return max(usual, least or 0)


def tried_by(plan: Plan) -> tuple[str, ...]:
    """Order, settings and audit of one schedule, by name."""
    return row_of(plan).tried(plan)


def coverage(plan: Plan, *, wanted: int, floor: int, ran: Collection[int], earlier: tuple[str, ...] = ()) -> Coverage:
    """ran: numbers of the schedules that have run to their end. earlier: names tried before those."""
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
