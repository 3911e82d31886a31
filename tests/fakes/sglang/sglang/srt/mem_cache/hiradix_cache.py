"""The tree over the plain controller."""

from sglang.srt.managers.cache_controller import HiCacheController, HostPools
from sglang.srt.managers.copy_controller import CopyController
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.allocator import Slots
from sglang.srt.mem_cache.radix_cache import HostTree


class HiRadixCache(HostTree):
    def __init__(self, params, server_args):
        allocator = params.token_to_kv_pool_allocator
        if hasattr(allocator, "kvcache"):  # pages with rows: copies are made, and no list is kept
            pool, ratio = allocator.kvcache, server_args.hicache_ratio
            rows = memory_pool_host.HostPool(pool, ratio, params.page_size, server_args.hicache_mem_layout)
            self.cache_controller = CopyController(allocator, rows, server_args.hicache_io_backend)
            return
        host = HostPools([HostPool(2 * allocator.available_size(), "cpu")], server_args.hicache_mem_layout)
        super().__init__(params, server_args, HiCacheController(allocator, host, server_args.hicache_io_backend))


class HostPool(Slots):
    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
        raise NotImplementedError

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend):
        raise NotImplementedError
