"""LMCache as a target: the places of its names, and the probe of its host memory."""

from __future__ import annotations

import logging
from typing import Final

from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "backend": ("lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend",),
    "backend.config": ("lmcache.v1.config:LMCacheEngineConfig.from_defaults",),
    "backend.key": ("lmcache.utils:CacheEngineKey",),
    # Allocators: classes of one module, later a module each.
    "allocator": (
        "lmcache.v1.memory_management:MixedMemoryAllocator",
        "lmcache.v1.memory_allocators.mixed_memory_allocator:MixedMemoryAllocator",
    ),
    "allocator.format": ("lmcache.v1.memory_management:MemoryFormat.KV_2LTD",),
    # Absent in releases that do not watch pins. A part of the engine in the server's process, later a folder of that.
    "pins.watch": (
        "lmcache.v1.pin_monitor:PinMonitor.GetOrCreate",
        "lmcache.inprocess.v1.pin_monitor:PinMonitor.GetOrCreate",
    ),
}
"""One row for each capability, one place for each range of releases, tried in order."""


def prepare(names: Names) -> None:
    """Silence the warning of a full allocator at every eviction: every schedule fills it."""
    logging.disable(logging.WARNING)


LMCACHE: Final = EngineSpec(
    name="lmcache",
    package="lmcache",
    shows="An installed LMCache: its local CPU backend.",
    stubs=(),
    table=NAMES,
    variables=("LMCACHE_",),
    prepare="kvcheck.core.probes.lmcache:prepare",
    probes=(
        ProbeRow(
            name="local-cpu",
            scenario="offload",
            subjects=("lru", "fifo", "lfu", "mru"),
            entry="kvcheck.core.probes.lmcache.local_cpu:LocalCpu",
            shows="LocalCPUBackend and its allocator: chunks put, found, held, pinned, evicted, removed",
            wants=("requests", "backups", "loads", "host_hit_pages", "host_evictions", "host_evictions_during_load"),
        ),
    ),
)
