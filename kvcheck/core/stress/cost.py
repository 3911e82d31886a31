"""Cost: the bytes and judgements of a schedule in words, from shape and request numbers alone."""

from __future__ import annotations

from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.workload.shapes import shape as shape_named


def schedule_cost(plan: Plan) -> str:
    shape = shape_named(plan.shape)
    requests = "the requests of the trace" if plan.trace is not None else "its requests"
    if plan.requests is not None:
        requests = f"{plan.requests:,} requests"
    return (
        f"{requests}, {token_bytes(shape):,} bytes of KV a token; next: a smaller --shape, fewer --requests or a "
        "larger --max-time"
    )


def token_bytes(shape: ModelShape) -> int:
    """Bytes of one token in all layers of the device pool, without states."""
    total = 0
    for space in POOLS.load(shape.family)(shape):
        for buffer in space.buffers:
            if buffer.rows is Granularity.TOKEN:
                total += len(space.layers) * buffer.row_bytes
            elif buffer.rows is Granularity.PAGE:
                total += len(space.layers) * buffer.row_bytes // shape.page_size
    return total
