"""vLLM as a target: its names, and the probes of its block bookkeeping.

Its block pool, managers and scheduler hold no tensors. The bytes of their blocks are an array of kvcheck's.
"""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow
from kvcheck.core.probes.vllm.names import NAMES

_CACHED = ("requests", "retractions", "resumes", "lookups", "device_hit_pages", "device_evictions")

VLLM: Final = EngineSpec(
    name="vllm",
    package="vllm",
    shows="An installed vLLM: its block pool, KV-cache manager, scheduler and CPU offload.",
    stubs=(),
    table=NAMES,
    variables=("VLLM_",),
    prepare="kvcheck.core.probes.vllm.names:prepare",
    probes=(
        ProbeRow(
            name="blocks",
            scenario="prefix-cache",
            subjects=("full",),
            entry="kvcheck.core.probes.vllm.blocks:Blocks",
            shows="KVCacheManager and its block pool: owners, free list, counts, hits and contents of blocks",
            wants=_CACHED,
        ),
        ProbeRow(
            name="scheduler",
            scenario="preemption",
            subjects=("fcfs", "priority", "priority-lookahead"),
            entry="kvcheck.core.probes.vllm.scheduler:Scheduling",
            shows="the scheduler over the same manager: what it counts as computed was computed",
            wants=("requests", "retractions", "resumes", "device_hit_pages"),
        ),
        ProbeRow(
            name="connector",
            scenario="offload",
            subjects=("eager", "lazy"),
            entry="kvcheck.core.probes.vllm.connector:Connected",
            shows="SimpleCPUOffloadConnector in the scheduler: copies between device and host that end late",
            wants=("requests", "backups", "loads", "host_hit_pages", "retractions", "resumes"),
        ),
        ProbeRow(
            name="cpu-offload",
            scenario="offload",
            subjects=("lru", "arc"),
            entry="kvcheck.core.probes.vllm.cpu_offload:CpuOffload",
            shows="CPUOffloadingManager: chunks stored, pinned by loads, evicted and stored again",
            wants=("backups", "loads", "host_hit_pages", "host_evictions", "host_evictions_during_load"),
        ),
    ),
)
