"""The row of RUNNERS for ranks that are processes of their own; the machine picks the order."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS
from kvcheck.core.cache.transfer.mooncake.library import require_library
from kvcheck.core.run.outcome import Runner, TargetOf
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.ranks.runner import RankRunner
from kvcheck.core.stress.rows import ScheduleRow, check_choices


class RanksRow(ScheduleRow):
    """Schedules whose ranks are processes. No choices are recorded."""

    floor = 1
    confirms = False
    is_once = is_alone = True
    tells_notes = True

    def takes(self, plan: Plan) -> bool:
        return plan.has_rank_processes

    def make(self, plan: Plan, target_of: TargetOf) -> Runner:
        return RankRunner()

    def check(self, plan: Plan) -> None:
        """Refuse plans that real processes cannot run. A missing library is UNKNOWN before any process starts."""
        strategy = None if plan.trace is not None else plan.strategy
        for name, value, able in (
            ("--backend", plan.backend, "eager"),
            ("--mutant", plan.mutant, None),
            ("--strategy", strategy or "portfolio", "portfolio"),
        ):
            if value != able:
                raise UsageError(
                    f"{name} {value}: --transport {plan.transport} runs real processes, in no chosen order"
                )
        if plan.device == "threads":
            raise UsageError(
                f"--device threads: --transport {plan.transport} runs ranks as processes; leave one of them out"
            )
        if plan.device != "cpu" and plan.transport not in SHARING_TRANSPORTS:
            able = " or ".join(SHARING_TRANSPORTS)
            raise UsageError(
                f"--device {plan.device}: the ranks of --transport {plan.transport} have host memory alone; expected "
                f"--device cpu, or --transport {able}"
            )
        if plan.transport == "mooncake":
            require_library()
        check_choices(plan)

    def order(self, plan: Plan) -> str:
        return "the machine's order"

    def left_out(self, plan: Plan) -> tuple[str, ...]:
        return ("chosen orders",)

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        """Orders of landing bytes that a host without a GPU does not show."""
        if base.transport not in SHARING_TRANSPORTS or base.device != "cpu":
            return []
        return [
            "not tried: copies of a device, and NVLink: on a host, bytes land in the order in which its CPU stores "
            f"them; next, where there is a GPU: kvcheck stress nvlink-aux --transport {base.transport} --device cuda"
        ]


RANKS = RanksRow()
