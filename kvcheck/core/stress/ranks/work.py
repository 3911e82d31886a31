"""The work of a plan for real processes: the shape and the jobs, equal in every process."""

from __future__ import annotations

import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import PROCESS_RANKS, Plan, parse_ranks, workload_seed
from kvcheck.core.stress.plan_scenario import scenario_of, variant_of
from kvcheck.core.stress.scenarios.pd_transfer import MESSAGES, PDTransfer
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.variants import Variant
from kvcheck.core.stress.workload.shapes import shape as shape_named


def pair_scenario(plan: Plan) -> PDTransfer:
    """Raises UsageError unless the plan's scenario has a prefill and a decode end."""
    scenario = scenario_of(plan)
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"{plan.scenario} runs in one process, over loopback; got transport={plan.transport}")
    return scenario


def work_of(plan: Plan) -> tuple[ModelShape, Load]:
    shape = shape_named(plan.shape)
    load = pair_scenario(plan).load(
        shape, seed=workload_seed(plan), requests=plan.requests, trace=plan.trace, variant=variant_of(plan)
    )
    return shape, load


def ranks_of(plan: Plan) -> tuple[int, int]:
    return parse_ranks(plan.ranks or PROCESS_RANKS)


def ways_of(scenario: PDTransfer, variant: Variant, *, takes_paths: bool) -> tuple[dict[str, str], bool]:
    """Paths by leg, none if the wire has only one; and whether metadata rows are messages."""
    if takes_paths:
        return scenario.paths(variant), variant["metadata path"] == MESSAGES
    return {}, scenario.sends_rows


def rank_backend(plan: Plan, end: str) -> RegionBackend:
    """On "cuda", the ends have a device each if there are two; "cuda:N" names one. Raises UnknownVerdict if there is
    none."""
    kind, _, number = plan.device.partition(":")
    if kind != "cuda":
        return RegionBackend()
    from kvcheck.core.cache.backend.device_region import DeviceRegionBackend

    is_other = end == "decode" and not number and torch.cuda.device_count() > 1
    return DeviceRegionBackend(1 if is_other else int(number or 0))
