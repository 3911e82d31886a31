"""A tree without branches: a node for each prefix, on either tier."""

from sglang import has_fault
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer


class RadixKey:
    def __init__(self, token_ids):
        self.token_ids = token_ids

    def __iter__(self):
        return iter(self.token_ids)


class TreeNode:
    def __init__(self, key=()):
        self.key = key
        self.children = {}
        self.value = self.host_value = self.mamba_value = self.mamba_host_value = None


class HostTree:
    def __init__(self, params, server_args, controller):
        self.allocator = params.token_to_kv_pool_allocator
        self.states = getattr(params.req_to_token_pool, "mamba_pool", None)
        self.cache_controller = controller
        self.is_write_through = server_args.hicache_write_policy == "write_through"
        self.root_node = TreeNode()

    def insert(self, params):
        node = self.root_node.children[tuple(params.key)] = TreeNode(params.key)
        node.value, node.mamba_value = params.value.clone(), params.mamba_value
        if self.is_write_through:
            self.write_backup(node)

    def write_backup(self, node):
        extra = [PoolTransfer(PoolName.MAMBA, device_indices=node.mamba_value)] if self.states else None
        node.host_value = self.cache_controller.write(node.value, extra_pools=extra).clone()
        if extra:
            node.mamba_host_value = extra[0].host_indices.clone()

    def evict(self, params):
        for node in self.root_node.children.values():
            if node.value is None:
                continue
            if node.host_value is None:
                self.write_backup(node)
            self.allocator.free(node.value)
            if self.states:
                self.states.free(node.mamba_value)
            node.value = node.mamba_value = None

    def evict_host(self, num_tokens):
        pages, *states = self.cache_controller.mem_pool_host.pools
        for name, node in list(self.root_node.children.items()):
            if num_tokens > 0 and node.value is None:
                num_tokens -= len(node.host_value)
                pages.free(node.host_value.to("meta") if has_fault("mixed-sides") else node.host_value)
                if states:
                    states[0].free(node.mamba_host_value)
                del self.root_node.children[name]

    def match_prefix(self, params):
        node = self.root_node.children[tuple(params.key)]
        return MatchResult(self.root_node, node, len(node.host_value))

    def init_load_back(self, params):
        node = params.last_host_node
        extra = [PoolTransfer(PoolName.MAMBA, host_indices=node.mamba_host_value)] if self.states else None
        node.value = self.cache_controller.load(node.host_value, extra_pools=extra).clone()
        if extra:
            node.mamba_value = extra[0].device_indices.clone()

    def ready_to_load_host_cache(self):
        self.cache_controller.start_loading()

    def check_hicache_events(self):
        pass
