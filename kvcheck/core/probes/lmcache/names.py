"""Places of LMCache's capabilities: one row for each capability, one place for each range of releases."""

from __future__ import annotations

import logging
from typing import Final

from kvcheck.core.probes.frame.names import Names

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


def prepare(names: Names) -> None:
    """Silence the warning of a full allocator at every eviction: every schedule fills it."""
    logging.disable(logging.WARNING)
