"""LMCache as a target: the places of its names, and the probe of its host memory."""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow
from kvcheck.core.probes.lmcache.names import NAMES

LMCACHE: Final = EngineSpec(
    name="lmcache",
    package="lmcache",
    shows="An installed LMCache: its local CPU backend.",
    stubs=(),
    table=NAMES,
    variables=("LMCACHE_",),
    prepare="kvcheck.core.probes.lmcache.names:prepare",
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
