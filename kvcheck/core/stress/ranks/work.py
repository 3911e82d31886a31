"""The work of a plan for real processes: the shape, the jobs, and how many bytes have to arrive.

Invariants:
- Every process makes the same work from the same plan, under the settings that the coverage counts for it.
- The bytes are counted from prompt lengths, the shape and the number of ranks alone. Layouts, page pairs and reports of
  ranks are not used.
"""

from __future__ import annotations

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.stress.plan_scenario import scenario_of
from kvcheck.core.stress.scenarios.pd_transfer import PDTransfer
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.schedule import PROCESS_RANKS, Plan, parse_ranks, workload_seed
from kvcheck.core.workload.shapes import shape as shape_named


def pair_scenario(plan: Plan) -> PDTransfer:
    """The plan's scenario, with its ranks. Raises UsageError unless it has a prefill and a decode end."""
    scenario = scenario_of(plan)
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"{plan.scenario} runs in one process, over loopback; got transport={plan.transport}")
    return scenario


def work_of(plan: Plan) -> tuple[ModelShape, Load]:
    """The shape and the jobs of a plan."""
    shape = shape_named(plan.shape)
    load = pair_scenario(plan).load(
        shape, seed=workload_seed(plan), requests=plan.requests, trace=plan.trace, variant=plan.variant
    )
    return shape, load


def ranks_of(plan: Plan) -> tuple[int, int]:
    """Numbers of prefill and decode ranks."""
    return parse_ranks(plan.ranks or PROCESS_RANKS)


def bytes_for(shape: ModelShape, prompt_tokens: int, decode_ranks: int) -> int:
    """Bytes that one decode rank has to receive for a prompt: its part of every buffer, and one metadata row."""
    size = shape.page_size
    pages = -(-prompt_tokens // size)
    hidden = max(0, prompt_tokens + 1 - shape.window) // size if shape.window_layers else 0
    units = {"full": pages, "window": pages - hidden, "state": 1}
    total = 0
    for space in POOLS.load(shape.family)(shape):
        for buffer in space.buffers:
            rows = units[space.name] * (size if buffer.rows is Granularity.TOKEN else 1)
            kept = max(1, buffer.shards // decode_ranks)
            total += len(space.layers) * rows * buffer.row_bytes * kept // buffer.shards
    last = metadata_fields(shape.hidden_size)[-1]
    return total + last.offset + last.size_bytes
