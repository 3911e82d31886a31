"""The scenario of a plan, with the ranks that it names if they suit its shape; and its variant."""

from __future__ import annotations

from zlib import crc32

from kvcheck.core.base.errors import LayoutMismatch, UsageError
from kvcheck.core.cache.pools.sharding import rank_shape
from kvcheck.core.run.plan import FLOOR, PROCESS_RANKS, Plan, parse_ranks
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.pd_transfer import PDTransfer
from kvcheck.core.stress.scenarios.scenario import Scenario
from kvcheck.core.stress.scenarios.variants import STRIDE
from kvcheck.core.stress.workload.shapes import TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named


def scenario_of(plan: Plan) -> Scenario:
    scenario = SCENARIOS.load(plan.scenario)()
    if plan.ranks is None and not (plan.has_rank_processes and isinstance(scenario, PDTransfer)):
        return scenario
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"--ranks {plan.ranks}: {plan.scenario} runs 1x1 only; pd-transfer and nvlink-aux take ranks")
    scenario.ranks = parse_ranks(plan.ranks or PROCESS_RANKS)
    _check_heads(plan, scenario.ranks)
    return scenario


def variant_of(plan: Plan) -> int:
    """The number of the variant that a plan runs: the next cell's is the next one, and so is the next seed's.

    The first schedules of all cells have the first variants, which bring the most pairs of settings.
    """
    return (plan.schedule + FLOOR * (plan.seed - 1)) * STRIDE + _place(plan)


def turn_of(plan: Plan) -> int:
    """First order of a plan's cell in a strategy that goes through several. It moves with the seed too."""
    return _place(plan) + plan.seed + crc32(plan.scenario.encode())


def _place(plan: Plan) -> int:
    """A number that differs between the tiny shapes and depends only on the shape's name."""
    return TINY_SHAPES.index(plan.shape) if plan.shape in TINY_SHAPES else crc32(plan.shape.encode())


def _check_heads(plan: Plan, ranks: tuple[int, int]) -> None:
    for size in ranks:
        try:
            rank_shape(shape_named(plan.shape), 0, size)
        except LayoutMismatch as error:
            raise UsageError(f"--ranks {plan.ranks}: {plan.shape} cannot be dealt out to them: {error}") from error
