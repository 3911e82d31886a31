"""The tree of hybrid models."""

from sglang.srt.managers.cache_controller import HostPools
from sglang.srt.mem_cache.hiradix_cache import HostPool
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.radix_cache import HostTree


class HiMambaRadixCache(HostTree):
    def __init__(self, params, server_args):
        allocator, states = params.token_to_kv_pool_allocator, params.req_to_token_pool.mamba_pool
        pools = [HostPool(2 * each.available_size(), "cpu") for each in (allocator, states)]
        host = HostPools(pools, server_args.hicache_mem_layout, states)
        super().__init__(params, server_args, HybridCacheController(allocator, host, server_args.hicache_io_backend))
