"""Trees: of prefixes, with one page to a node; and one without branches over a host tier, with a prefix to a node."""

import torch

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
        self.load_back_threshold = 256 if has_fault("loads-long-alone") else 10

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
                if has_fault("freed-twice"):
                    pages.free(node.host_value)
                pages.free(node.host_value.to("meta") if has_fault("mixed-sides") else node.host_value)
                if states:
                    states[0].free(node.mamba_host_value)
                del self.root_node.children[name]

    def match_prefix(self, params):
        node = self.root_node.children[tuple(params.key)]
        return MatchResult(self.root_node, node, len(node.host_value))

    def init_load_back(self, params):
        node = params.last_host_node
        if len(node.host_value) < self.load_back_threshold:
            return
        extra = [PoolTransfer(PoolName.MAMBA, host_indices=node.mamba_host_value)] if self.states else None
        node.value = self.cache_controller.load(node.host_value, extra_pools=extra).clone()
        if extra:
            node.mamba_value = extra[0].device_indices.clone()

    def ready_to_load_host_cache(self):
        self.cache_controller.start_loading()

    def check_hicache_events(self):
        pass


class Node:
    def __init__(self, key, value, parent):
        self.key, self.value, self.parent = key, value, parent
        self.children, self.lock_ref = {}, 0


class RadixCache:
    def __init__(self, params):
        self.rows, self.slots, self.page = params.req_to_token_pool, params.token_to_kv_pool_allocator, params.page_size
        self.reset()

    def reset(self):
        self.root_node, self.evictable, self.protected = Node((), torch.empty(0, dtype=torch.int64), None), 0, 0

    def evictable_size(self):
        return self.evictable

    def protected_size(self):
        return self.protected

    def match(self, tokens):
        node, values = self.root_node, []
        for start in range(0, len(tokens) - self.page + 1, self.page):
            child = node.children.get(tuple(tokens[start : start + self.page]))
            if child is None:
                break
            node = child
            values.append(node.value)
        return torch.cat(values) if values else self.root_node.value, node

    def lock(self, node, more):
        while node is not self.root_node:
            if node.lock_ref == 0 or node.lock_ref + more == 0:
                self.evictable -= more * self.page
                self.protected += more * self.page
            node.lock_ref += more
            node = node.parent

    def insert(self, tokens, values, owned):
        node = self.root_node
        for start in range(0, len(tokens) // self.page * self.page, self.page):
            key, value = tuple(tokens[start : start + self.page]), values[start : start + self.page]
            if key not in node.children:
                node.children[key] = Node(key, value.clone(), node)
                self.evictable += self.page
            elif start >= owned:
                self.slots.free(value)
            node = node.children[key]

    def cache_unfinished_req(self, req, chunked=False):
        end = len(req.fill_ids)
        values = self.rows.req_to_token[req.req_pool_idx, :end].long()
        self.insert(req.fill_ids, values, req.owned)
        found, node = self.match(req.fill_ids)
        self.rows.write((req.req_pool_idx, slice(0, len(found))), found.int())
        self.lock(req.last_node, -1)
        self.lock(node, 1)
        req.prefix_indices, req.last_node, req.owned = torch.cat((found, values[len(found) :])), node, len(found)

    def cache_finished_req(self, req, is_insert):
        end = req.kv_len
        values = self.rows.req_to_token[req.req_pool_idx, :end].long()
        whole = end // self.page * self.page
        if is_insert:
            self.insert((req.origin_input_ids + req.output_ids)[:end], values, req.owned)
        else:
            self.slots.free(values[req.owned : whole])
        self.slots.free(values[whole:])
        if has_fault("frees-twice"):
            self.slots.free(values[whole:])
        if not has_fault("lock-stays"):
            self.lock(req.last_node, -1)

    def evict(self, tokens):
        stack, leaves = [self.root_node], []
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node is not self.root_node and not node.children and (not node.lock_ref or has_fault("evicts-locked")):
                leaves.append(node)
        for node in leaves:
            if tokens > 0:
                self.slots.free(node.value)
                self.evictable -= self.page
                tokens -= self.page
                if not has_fault("child-stays"):
                    del node.parent.children[node.key]
        if leaves and tokens > 0 and not has_fault("evicts-locked") and not has_fault("child-stays"):
            self.evict(tokens)
