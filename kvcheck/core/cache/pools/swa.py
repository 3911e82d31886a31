"""SWA hybrid pools: a full pool and a smaller window pool, tied by the full-to-window page map.

Invariants:
- A window page exists only while the window can see some token of it; the map is 0 afterwards.
"""

from __future__ import annotations

from kvcheck.core.cache.pools.buffers import Granularity, SpaceSpec
from kvcheck.core.cache.pools.mha import kv_buffers
from kvcheck.core.cache.pools.shape import ModelShape


def swa_spaces(shape: ModelShape) -> tuple[SpaceSpec, ...]:
    return (
        SpaceSpec(name="full", unit=Granularity.PAGE, layers=shape.full_layers, buffers=kv_buffers(shape)),
        SpaceSpec(name="window", unit=Granularity.PAGE, layers=shape.window_layers, buffers=kv_buffers(shape)),
    )
