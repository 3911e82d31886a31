"""`kvcheck stress --answers-within K`: every schedule within K answers of the eager order, of each variant.

Invariants:
- Without findings, a cell passes if all of them ran, else it is UNKNOWN.
"""

from __future__ import annotations

from kvcheck.core.base.errors import UsageError
from kvcheck.core.run.cell import ScheduleCell
from kvcheck.core.run.plan import ANSWERS

PORTFOLIO = "portfolio"


def strategy_of(strategy: str, within: int | None) -> str:
    if within is None:
        return strategy
    if within < 0:
        raise UsageError(f"--answers-within {within}: expected a number from 0 on")
    if strategy not in (PORTFOLIO, ANSWERS):
        raise UsageError(f"--answers-within {within}: expected --strategy answers, or none; got {strategy}")
    return ANSWERS


def plan_exploring(cell: ScheduleCell, *, within: int, workloads: int | None) -> None:
    """Make a cell run all schedules within so many answers. workloads: None takes one of each variant."""
    from kvcheck.core.stress.plan_scenario import scenario_of

    cell.within = within
    cell.wanted = 1 if cell.plan.trace is not None else workloads or scenario_of(cell.plan).table.variants
    cell.floor = cell.wanted
