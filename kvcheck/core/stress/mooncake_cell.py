"""The Mooncake cell: schedules over real processes, beside a run's simulated cells.

Invariants:
- It joins a run only if all options but those that pick cells are at their defaults, so that no named option is
  ignored.
- It is left out, with a line, if Mooncake's engine does not load or would listen outside a private network. The verdict
  does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.private_network import PrivateNetwork
from kvcheck.core.cache.transfer.mooncake.library import require_library, why_unusable
from kvcheck.core.run.plan import Plan

SIMULATED = Plan(scenario="pd-transfer", shape="llama-3-tiny")
"""The cell that it joins: the smallest shape with two ends. The seed is the run's."""
SCHEDULES = 3
"""As many as a pass of a simulated cell takes."""
LEAST_TIME_S = 120.0
"""A --max-time below this leaves it out. It takes 37 s on two idle cores, mostly waiting, and longer on busy ones."""
CPU_S = 15.0
"""CPU seconds by which a run with it bounds its other cells earlier. It takes 10 in processes of its own, and mostly
waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeCell:
    """plans: one, or none if it is left out. untried: the line with the reason. cpu_s: taken from the other cells."""

    plans: tuple[Plan, ...] = ()
    untried: tuple[str, ...] = ()
    cpu_s: float = 0.0


def mooncake_cell(
    plans: Sequence[Plan], *, transport: str | None, max_time_s: float | None, least: int | None
) -> MooncakeCell:
    """transport: the named one. least: schedules that each cell needs."""
    beside = next((plan for plan in plans if replace(plan, seed=SIMULATED.seed) == SIMULATED), None)
    if beside is None or transport is not None:
        return MooncakeCell()
    plan = replace(beside, transport="mooncake", backend="eager", ranks="1x1")
    if why := _why_not(max_time_s, least):
        text = f"not tried: {plan.cell}, real processes over Mooncake's transfer engine: {why}"
        return MooncakeCell(untried=(text,))
    return MooncakeCell(plans=(plan,), cpu_s=CPU_S)


def exposure(plan: Plan) -> list[str]:
    """A warning if Mooncake's engine can be reached from outside."""
    if plan.transport != "mooncake":
        return []
    with PrivateNetwork() as network:
        if network.path is not None:
            return []
        return [
            f"Mooncake's engine listens on all interfaces of this machine and asks nobody who he is: {network.why}; "
            "expected a network where everybody is trusted"
        ]


def _why_not(max_time_s: float | None, least: int | None) -> str | None:
    try:
        require_library()
    except UnknownVerdict as error:
        return str(error)
    if max_time_s is not None and max_time_s < LEAST_TIME_S:
        return f"--max-time {max_time_s:g} is short for it; next: --max-time {LEAST_TIME_S:g} or more"
    if least is not None and least > SCHEDULES:
        return f"it runs {SCHEDULES} schedules, and --min-schedules asks for {least}; next: {_alone(least)}"
    if why := why_unusable():
        return why
    with PrivateNetwork() as network:
        if network.path is None:
            return (
                f"{network.why}, so its engine would listen on all interfaces; next, where everybody is trusted: "
                f"{_alone(SCHEDULES)}"
            )
    return None


def _alone(schedules: int) -> str:
    cell = f"{SIMULATED.scenario} --shape {SIMULATED.shape}"
    return f"kvcheck stress {cell} --transport mooncake --schedules {schedules}"
