"""SGLang as a target: its stand-in packages, its names, and its probes."""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.tables import Dropped, EngineSpec, ProbeRow, Reviewed

_WAYS = tuple(f"{family}-{way}" for family in ("mha", "mla", "nsa") for way in ("kernel", "late", "direct"))
_BOTH = ("cpu", "cuda")
_POOLS = ("mha", "mla", "nsa", "swa", "mamba")

_UNIFIED = ("0.5.21", "0.5.22", "0.5.23")
"""Releases whose scheduler makes the unified tree instead of SWARadixCache and MambaRadixCache."""
_CUT = "no way is known in which peers of one release build unequal lists (#27004), and copies cut them (#23323)"
_WINDOWS = ("KV301 content: device swa_kv_pool.k_buffer", "KV301 content: device swa_kv_pool.v_buffer")
_STALE = ("KV102 content: device swa_kv_pool.k_buffer", "KV102 content: device swa_kv_pool.v_buffer")
_ENDS = ("KV301 contract: lengths, prefill shorter at the start", "KV301 contract: lengths, prefill shorter at the end")

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
"""One row for each capability, one place for each range of releases, tried in order."""
SGLANG: Final = EngineSpec(
    name="sglang",
    shows="An installed SGLang: sglang for the one beside kvcheck, sglang:DIR for that of an environment.",
    package="sglang",
    stubs=("sgl_kernel", "torchvision", "tvm_ffi"),
    table=NAMES,
    variables=("SGLANG_", "SGL_"),
    prepare="kvcheck.core.probes.sglang.rig.bare_manager:prepare",
    compiled="kvcheck.core.probes.sglang.rig.compiled_copies:require_compiled",
    probes=(
        ProbeRow(
            name="pool-copy",
            scenario="retract-resume",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.pool_copy:PoolCopy",
            shows="every tensor of a pool comes back by get_cpu_copy and load_cpu_copy, after others used its pages",
            devices=_BOTH,
        ),
        ProbeRow(
            name="retract",
            scenario="retract-resume",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.retract:Retract",
            shows="all of a pool comes back by Req.offload_kv_cache and load_kv_cache, with real allocator and rows",
            devices=_BOTH,
            wants_held=("orderings_checked",),
        ),
        ProbeRow(
            name="token-moves",
            scenario="speculation",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.token_moves:TokenMoves",
            shows="move_kv_cache moves a token's bytes of every buffer to its new slot, and no others",
            reviewed=(
                Reviewed(
                    subject="nsa",
                    releases=("0.5.21", "0.5.22"),
                    places=(
                        "KV301 content: index_key_cache.buffer",
                        "KV902 liveness: DSATokenToKVPool: tokens # moved to #: move_kv_cache raised IndexError: index "
                        "# is out of bounds for dimension # with size # (sglang.srt.mem_cache.index_key_cac",
                    ),
                    why="servers with this pool draft chains, which move no tokens; trees do (#31215, #31218)",
                ),
            ),
        ),
        ProbeRow(
            name="metadata",
            scenario="retract-resume",
            subjects=("get-buf",),
            entry="kvcheck.core.probes.sglang.metadata:MetadataSlots",
            shows="what get_buf returned stays as it was when its slot is given to another request",
        ),
        ProbeRow(
            name="layer-wait",
            scenario="hicache",
            subjects=("mha", "mla", "nsa"),
            entry="kvcheck.core.probes.sglang.layer_wait:LayerWait",
            shows="every reader of a pool waits for its layer's load before it reads",
            wants=("orderings_checked",),
            devices=_BOTH,
        ),
        ProbeRow(
            name="host-copy",
            scenario="hicache",
            subjects=_WAYS,
            entry="kvcheck.core.probes.sglang.host_copy:HostCopy",
            shows="pages come back from the host whole and in time, while pages of both tiers change hands",
            wants=("backups", "loads", "device_evictions", "host_evictions", "orderings_checked"),
            devices=_BOTH,
        ),
        ProbeRow(
            name="index-moves",
            scenario="hicache-hybrid",
            subjects=(
                "hybrid-kernel",
                "hybrid-direct",
                "tree-kernel",
                "tree-direct",
                "mamba-tree-kernel",
                "mamba-tree-direct",
            ),
            entry="kvcheck.core.probes.sglang.index_moves:IndexMoves",
            shows="lists that a tree keeps stay on their side and keep their values while copies move theirs",
        ),
        ProbeRow(
            name="prefixes",
            scenario="prefix-cache",
            subjects=("radix", "swa", "mamba", "unified-full", "unified-swa", "unified-mamba"),
            entry="kvcheck.core.probes.sglang.prefix_cache:PrefixCache",
            shows="prefix trees over their allocators and pools: owners, locks, sizes, hits and contents of pages",
            wants=("requests", "retractions", "resumes", "lookups", "device_hit_pages", "device_evictions"),
            dropped=(
                Dropped(
                    subject="swa",
                    lacks="tree.swa",
                    releases=_UNIFIED,
                    why="hybrid models with windows have the unified tree since 0.5.21 (prefixes.unified-swa)",
                ),
                Dropped(
                    subject="mamba",
                    lacks="tree.mamba",
                    releases=_UNIFIED,
                    why="hybrid models with states have the unified tree since 0.5.21 (prefixes.unified-mamba)",
                ),
            ),
        ),
        ProbeRow(
            name="state-lengths",
            scenario="pd-transfer",
            subjects=("nsa-longer", "nsa-shorter", "swa-longer", "swa-shorter"),
            entry="kvcheck.core.probes.sglang.state_lengths:StateLengths",
            shows="a state list longer or shorter than its receiver's harms nobody: its own request at most fails",
            reviewed=(
                Reviewed(
                    subject="nsa-shorter",
                    releases=_UNIFIED,
                    places=("KV102 content: device index_key_cache.buffer", _ENDS[1]),
                    why=_CUT,
                ),
                Reviewed(
                    subject="swa-longer",
                    releases=_UNIFIED,
                    places=(*_WINDOWS, "KV301 contract: lengths, prefill longer at the start"),
                    why=_CUT,
                ),
                Reviewed(subject="swa-shorter", releases=_UNIFIED, places=(*_WINDOWS, *_STALE, *_ENDS), why=_CUT),
            ),
        ),
        ProbeRow(
            name="sent-lists",
            scenario="pd-transfer",
            subjects=("mha", "nsa", "swa"),
            entry="kvcheck.core.probes.sglang.sent_lists:SentLists",
            shows="the prefill side lists the pages and states of the prompt, each once, whatever its chunks were",
            wants=("requests", "pages_wanted"),
        ),
        ProbeRow(
            name="state-failure",
            scenario="pd-transfer",
            subjects=("nsa", "swa"),
            entry="kvcheck.core.probes.sglang.state_lengths:StateFailure",
            shows="a request whose states the copy engine failed to copy is told failed on both sides",
        ),
        ProbeRow(
            name="agreement",
            scenario="nvlink-aux",
            subjects=("metadata", "everything", "default-metadata"),
            entry="kvcheck.core.probes.sglang.agreement:Agreement",
            shows="ranks commit the same requests at the same poll, and what they commit is all there",
        ),
    ),
)
