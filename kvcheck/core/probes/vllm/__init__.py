"""vLLM as a target: its names, and the probes of its block bookkeeping.

Its block pool, managers and scheduler hold no tensors. The bytes of their blocks are an array of kvcheck's.
"""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow

_CACHED = ("requests", "retractions", "resumes", "lookups", "device_hit_pages", "device_evictions")

_CORE = "vllm.v1.core"

NAMES: Final[dict[str, tuple[str, ...]]] = {
    # Blocks of the device.
    "manager": (f"{_CORE}.kv_cache_manager:KVCacheManager",),
    "manager.config": ("vllm.v1.kv_cache_interface:KVCacheConfig",),
    "manager.tensor": ("vllm.v1.kv_cache_interface:KVCacheTensor",),
    "manager.group": ("vllm.v1.kv_cache_interface:KVCacheGroupSpec",),
    "attention.full": ("vllm.v1.kv_cache_interface:FullAttentionSpec",),
    # Requests, and the hashes that their blocks are found by.
    "request": ("vllm.v1.request:Request",),
    "request.status": ("vllm.v1.request:RequestStatus",),
    "request.sampling": ("vllm.sampling_params:SamplingParams",),
    "hash.function": ("vllm.utils.hashing:sha256", "vllm.utils:sha256"),
    "hash.begin": (f"{_CORE}.kv_cache_utils:init_none_hash",),
    "hash.blocks": (f"{_CORE}.kv_cache_utils:get_request_block_hasher",),
    # The scheduler and its configuration.
    "scheduler": (f"{_CORE}.sched.scheduler:Scheduler",),
    "scheduler.output": ("vllm.v1.outputs:ModelRunnerOutput",),
    "scheduler.grammars": ("vllm.v1.structured_output:StructuredOutputManager",),
    "config": ("vllm.config:VllmConfig",),
    "config.model": ("vllm.config:ModelConfig",),
    "config.scheduler": ("vllm.config:SchedulerConfig",),
    "config.cache": ("vllm.config:CacheConfig",),
    "config.parallel": ("vllm.config:ParallelConfig",),
    "config.device": ("vllm.config:DeviceConfig",),
    "config.speculation": ("vllm.config:SpeculativeConfig",),
    # A connector: its arguments from the scheduler, and reports of its worker.
    "connector": (
        "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector:SimpleCPUOffloadConnector",
    ),
    "connector.config": ("vllm.config:KVTransferConfig",),
    "connector.report": ("vllm.v1.outputs:KVConnectorOutput",),
    "connector.stored": ("vllm.v1.simple_kv_offload.metadata:SimpleCPUOffloadWorkerMetadata",),
    # Chunks of the host.
    "offload.manager": ("vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager",),
    "offload.request": ("vllm.v1.kv_offload.base:ReqContext", "vllm.v1.kv_offload.abstract:ReqContext"),
    "offload.key": ("vllm.v1.kv_offload.base:make_offload_key", "vllm.v1.kv_offload.abstract:make_offload_key"),
}
"""One row for each capability, one place for each range of releases, tried in order."""
HASHES = ("hash.function", "hash.begin", "hash.blocks")


def prepare(names: Names) -> None:
    """Set the first hash of every chain, in releases that have one, with the hash function that continues the chain."""
    if names.has("hash.begin") and names.has("hash.function"):
        names["hash.begin"](names["hash.function"])


VLLM: Final = EngineSpec(
    name="vllm",
    package="vllm",
    shows="An installed vLLM: its block pool, KV-cache manager, scheduler and CPU offload.",
    stubs=(),
    table=NAMES,
    variables=("VLLM_",),
    prepare="kvcheck.core.probes.vllm:prepare",
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
