"""Places of SGLang's capabilities: one row a capability, one place for each range of releases."""

from __future__ import annotations

from typing import Final

_MEM = "sglang.srt.mem_cache"

NAMES: Final[dict[str, tuple[str, ...]]] = {
    # Pools. NSA was renamed to DSA; windows and states moved to modules of their own.
    "pool.mha": (f"{_MEM}.memory_pool:MHATokenToKVPool",),
    "pool.mla": (f"{_MEM}.memory_pool:MLATokenToKVPool",),
    "pool.nsa": (f"{_MEM}.memory_pool:NSATokenToKVPool", f"{_MEM}.memory_pool:DSATokenToKVPool"),
    "pool.swa": (f"{_MEM}.swa_memory_pool:SWAKVPool", f"{_MEM}.memory_pool:SWAKVPool"),
    "pool.mamba": (f"{_MEM}.memory_pool:HybridLinearKVPool",),
    "pool.requests": (f"{_MEM}.memory_pool:ReqToTokenPool",),
    "pool.hybrid-requests": (f"{_MEM}.memory_pool:HybridReqToTokenPool",),
    # Allocators: a module, later a package.
    "allocator.token": (f"{_MEM}.allocator:TokenToKVPoolAllocator", f"{_MEM}.allocator.token:TokenToKVPoolAllocator"),
    "allocator.paged": (
        f"{_MEM}.allocator:PagedTokenToKVPoolAllocator",
        f"{_MEM}.allocator.paged:PagedTokenToKVPoolAllocator",
    ),
    "allocator.swa": (
        f"{_MEM}.swa_memory_pool:SWATokenToKVPoolAllocator",
        f"{_MEM}.allocator.swa:SWATokenToKVPoolAllocator",
        f"{_MEM}.allocator:SWATokenToKVPoolAllocator",
    ),
    # Requests, and how one is saved on retraction.
    "request": ("sglang.srt.managers.schedule_batch:Req",),
    "request.sampling": ("sglang.srt.sampling.sampling_params:SamplingParams",),
    "request.save": ("sglang.srt.managers.schedule_batch:Req.offload_kv_cache",),
    "request.load": ("sglang.srt.managers.schedule_batch:Req.load_kv_cache",),
    # Metadata of a transfer.
    "metadata.buffers": ("sglang.srt.disaggregation.utils:MetadataBuffers",),
    "metadata.slots": ("sglang.srt.disaggregation.utils:ReqToMetadataIdxAllocator",),
    # The layer counter of the host tier.
    "layers.counter": ("sglang.srt.managers.cache_controller:LayerDoneCounter",),
    # Server arguments, which some objects read when they are made.
    "server.args": ("sglang.srt.server_args:ServerArgs",),
    "server.variables": ("sglang.srt.environ:envs",),
    "server.publish": ("sglang.srt.server_args:set_global_server_args_for_scheduler",),
    # The two sides of a transfer. State lists became lists of lists, one a kind.
    "transfer.manager": ("sglang.srt.disaggregation.mooncake.conn:MooncakeKVManager",),
    "transfer.info": ("sglang.srt.disaggregation.mooncake.conn:TransferInfo",),
    "transfer.chunk": (
        "sglang.srt.disaggregation.mooncake.conn:TransferKVChunk",
        "sglang.srt.disaggregation.common.utils:TransferKVChunk",
    ),
    "transfer.peer": ("sglang.srt.disaggregation.mooncake.conn:KVArgsRegisterInfo",),
    "transfer.poll": ("sglang.srt.disaggregation.base.conn:KVPoll",),
    "transfer.mode": ("sglang.srt.disaggregation.utils:DisaggregationMode",),
    "transfer.kinds": ("sglang.srt.disaggregation.base.conn:StateType",),
    "transfer.custom-pool": ("sglang.srt.disaggregation.mooncake.utils:check_mooncake_custom_mem_pool_enabled",),
    "transfer.prefill": ("sglang.srt.disaggregation.prefill:SchedulerDisaggregationPrefillMixin",),
    "transfer.queue": ("sglang.srt.disaggregation.decode:DecodeTransferQueue",),
    "transfer.queued": ("sglang.srt.disaggregation.decode:DecodeRequest",),
    # The host tier: controllers, and arguments from a hybrid model's tree.
    "hicache.controller": ("sglang.srt.managers.cache_controller:HiCacheController",),
    "hicache.hybrid": (f"{_MEM}.hybrid_cache.hybrid_cache_controller:HybridCacheController",),
    "hicache.transfer": (f"{_MEM}.hicache_storage:PoolTransfer",),
    "hicache.pool-name": (f"{_MEM}.hicache_storage:PoolName",),
    "hicache.host-group": (f"{_MEM}.pool_host.group:HostPoolGroup", f"{_MEM}.memory_pool_host:HostPoolGroup"),
    "hicache.host-entry": (f"{_MEM}.pool_host.group:PoolEntry", f"{_MEM}.memory_pool_host:PoolEntry"),
    # Trees over a host tier: one a kind of model, later one for all, which had no host tier at first.
    "hicache.tree": (f"{_MEM}.hiradix_cache:HiRadixCache",),
    "hicache.mamba-tree": (f"{_MEM}.hi_mamba_radix_cache:HiMambaRadixCache",),
    "hicache.unified-tree": (f"{_MEM}.unified_radix_cache:UnifiedRadixCache",),
    "hicache.unified-start": (f"{_MEM}.unified_radix_cache:UnifiedRadixCache.init_hicache",),
    "tree.components": (
        f"{_MEM}.unified_cache_components:ComponentType",
        f"{_MEM}.unified_cache.components:ComponentType",
    ),
    # The slots of a match by its node. Before, the match listed them itself.
    "tree.path-slots": (f"{_MEM}.unified_radix_cache:UnifiedRadixCache.path_device_indices",),
    "tree.compiled-core": (f"{_MEM}.rust_tree_core.adapter:RustUnifiedTreeCore",),
    # Arguments of a tree and its calls. Older releases have no argument object for a load.
    "tree.params": (f"{_MEM}.cache_init_params:CacheInitParams",),
    "tree.key": (f"{_MEM}.radix_cache:RadixKey",),
    "tree.insert": (f"{_MEM}.base_prefix_cache:InsertParams",),
    "tree.match": (f"{_MEM}.base_prefix_cache:MatchPrefixParams",),
    "tree.evict": (f"{_MEM}.base_prefix_cache:EvictParams",),
    "tree.load": (f"{_MEM}.base_prefix_cache:InitLoadBackParams",),
    # Host pools. The modules list the available copies.
    "host.mha": (f"{_MEM}.pool_host.mha:MHATokenToKVPoolHost", f"{_MEM}.memory_pool_host:MHATokenToKVPoolHost"),
    "host.mla": (f"{_MEM}.pool_host.mla:MLATokenToKVPoolHost", f"{_MEM}.memory_pool_host:MLATokenToKVPoolHost"),
    "host.index": (f"{_MEM}.pool_host.dsa:DSAIndexerPoolHost", f"{_MEM}.memory_pool_host:DSAIndexerPoolHost"),
    "hicache.phase": (f"{_MEM}.unified_cache.components.base:CacheTransferPhase",),
    # Trees without a host tier, one a kind of model, and the batches that drive any tree.
    "tree.radix": (f"{_MEM}.radix_cache:RadixCache",),
    "tree.swa": (f"{_MEM}.swa_radix_cache:SWARadixCache",),
    "tree.mamba": (f"{_MEM}.mamba_radix_cache:MambaRadixCache",),
    "tree.publish": (f"{_MEM}.common:checkpoint_kv_cache", f"{_MEM}.common:maybe_cache_unfinished_req"),
    "tree.release": (f"{_MEM}.common:release_kv_cache",),
    "batch": ("sglang.srt.managers.schedule_batch:ScheduleBatch",),
    "batch.abort": ("sglang.srt.managers.schedule_batch:FINISH_ABORT",),
    "batch.adder": ("sglang.srt.managers.schedule_policy:PrefillAdder",),
    "batch.added": ("sglang.srt.managers.schedule_policy:AddReqResult",),
    "batch.algorithm": ("sglang.srt.speculative.spec_info:SpeculativeAlgorithm",),
}
