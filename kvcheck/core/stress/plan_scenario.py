"""The scenario of a plan, with the ranks that it names if they suit its shape."""

from __future__ import annotations

from kvcheck.core.base.errors import LayoutMismatch, UsageError
from kvcheck.core.cache.pools.sharding import rank_shape
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.pd_transfer import PDTransfer
from kvcheck.core.stress.scenarios.scenario import Scenario
from kvcheck.core.stress.schedule import PROCESS_RANKS, Kind, Plan, parse_ranks
from kvcheck.core.stress.workload.shapes import shape as shape_named


def scenario_of(plan: Plan) -> Scenario:
    scenario = SCENARIOS.load(plan.scenario)()
    if plan.ranks is None and not (plan.kind is Kind.RANKS and isinstance(scenario, PDTransfer)):
        return scenario
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"--ranks {plan.ranks}: {plan.scenario} runs 1x1 only; pd-transfer and nvlink-aux take ranks")
    scenario.ranks = parse_ranks(plan.ranks or PROCESS_RANKS)
    _check_heads(plan, scenario.ranks)
    return scenario


def _check_heads(plan: Plan, ranks: tuple[int, int]) -> None:
    for size in ranks:
        try:
            rank_shape(shape_named(plan.shape), 0, size)
        except LayoutMismatch as error:
            raise UsageError(f"--ranks {plan.ranks}: {plan.shape} cannot be dealt out to them: {error}") from error
