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
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS
from kvcheck.core.stress.audit import AUDIT, is_audited
from kvcheck.core.stress.plan_scenario import scenario_of
from kvcheck.core.stress.runner_rows import row_of
from kvcheck.core.stress.schedule import ANSWERS, Kind, Plan
from kvcheck.core.stress.strategies import DELAYS, delay_name

NOT_FOR_PROCESSES = ("retry delay",)
"""Kinds of settings without effect on ranks in processes."""
PATHS = ("metadata path",)
"""Those that need processes with shared memory."""
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
    order = row_of(plan).order(plan)
    if order is None:
        return ()
    return (order, *settings_tried_by(plan), *((AUDIT,) if is_audited(plan) else ()))


def settings_tried_by(plan: Plan) -> tuple[str, ...]:
    return tuple(name for name in scenario_of(plan).table.variant(plan.variant).names if _has_effect(plan, name))


def _all_settings(plan: Plan) -> tuple[str, ...]:
    if row_of(plan).order(plan) is None:
        return ()
    return tuple(name for name in scenario_of(plan).table.names if _has_effect(plan, name))


def _has_effect(plan: Plan, setting: str) -> bool:
    """Processes never send again, and send metadata in one way unless they share memory."""
    if plan.kind is not Kind.RANKS:
        return True
    lacking = NOT_FOR_PROCESSES if plan.transport in SHARING_TRANSPORTS else NOT_FOR_PROCESSES + PATHS
    return setting.partition(":")[0] not in lacking


def coverage(plan: Plan, *, wanted: int, floor: int, ran: Collection[int], earlier: tuple[str, ...] = ()) -> Coverage:
    """ran: numbers of the schedules that have run to their end. earlier: names tried before those."""
    planned = range(plan.schedule, plan.schedule + max(wanted, ROUND))
    tried = [*dict.fromkeys((*earlier, *_names(plan, sorted(ran))))]
    left = [name for name in (*_names(plan, planned), *_all_settings(plan)) if name not in tried]
    return Coverage(
        wanted=wanted, floor=floor, tried=tuple(tried), not_tried=(*dict.fromkeys(left), *row_of(plan).left_out(plan))
    )


def shortfall(plan: Plan, found: Coverage, *, ran: int) -> str | None:
    if ran < found.floor:
        return f"{ran} of {counted(found.wanted, 'schedule')} ran, and a pass takes {found.floor}"
    if plan.strategy == "portfolio" and plan.backend == "simulated" and {*found.tried} & {*_ORDERS} == {"eager"}:
        return f"{ran} of {counted(found.wanted, 'schedule')} ran, and none of them was lazy or delayed"
    return None


_ORDERS = ("eager", "lazy", "random", ANSWERS, *map(delay_name, DELAYS))


def _names(plan: Plan, numbers: Iterable[int]) -> list[str]:
    return [*dict.fromkeys(name for at in numbers for name in tried_by(dataclasses.replace(plan, schedule=at)))]
