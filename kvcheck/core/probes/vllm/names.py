"""Places of vLLM's capabilities: one row for each capability, one place for each range of releases."""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.names import Names

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


HASHES = ("hash.function", "hash.begin", "hash.blocks")


def prepare(names: Names) -> None:
    """Set the first hash of every chain, in releases that have one, with the hash function that continues the chain."""
    if names.has("hash.begin") and names.has("hash.function"):
        names["hash.begin"](names["hash.function"])
