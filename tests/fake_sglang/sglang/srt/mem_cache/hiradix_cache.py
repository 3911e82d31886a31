"""The prefix tree, as far as it puts a host tier together."""

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool_host import HostPool


class HiRadixCache:
    def __init__(self, params, server_args):
        allocator = params.token_to_kv_pool_allocator
        host = HostPool(allocator.kvcache, server_args.hicache_ratio, params.page_size, server_args.hicache_mem_layout)
        self.cache_controller = HiCacheController(allocator, host, server_args.hicache_io_backend)
