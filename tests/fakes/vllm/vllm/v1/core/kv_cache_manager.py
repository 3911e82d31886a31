"""Stand-in: blocks that are counted, freed in order and found by the prefix that they end."""

from collections import deque
from types import SimpleNamespace

from vllm import has_fault


class BlockPool:
    def __init__(self, count):
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(count)]
        self.free = deque(self.blocks[1:])
        self.by_prefix, self.prefix_of = {}, {}
        self.free_block_queue = SimpleNamespace(get_all_free_blocks=lambda: list(self.free))

    def get_num_free_blocks(self):
        return len(self.free)

    def take(self):
        block = self.free.popleft()
        if has_fault("hands-out-held") and block.block_id % 5 == 0:
            self.free.append(block)
        prefix = self.prefix_of.pop(block.block_id, None)
        if prefix is not None and not has_fault("stale-hash"):
            self.by_prefix.pop(prefix)
        block.ref_cnt = 1
        return block

    def keep(self, prefix, block):
        if prefix not in self.by_prefix and block.block_id not in self.prefix_of:
            self.by_prefix[prefix], self.prefix_of[block.block_id] = block, prefix


class KVCacheManager:
    def __init__(self, kv_cache_config, max_model_len, hash_block_size, enable_caching=True):
        self.size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.block_pool = BlockPool(kv_cache_config.num_blocks)
        self.tables = {}

    def get_computed_blocks(self, request):
        hit = []
        for prefix in request.hasher(request.all_token_ids[:-1]):
            if prefix not in self.block_pool.by_prefix:
                break
            hit.append(self.block_pool.by_prefix[prefix])
        hit = hit[:-1] if has_fault("short-hit") else hit
        return SimpleNamespace(blocks=(hit,)), len(hit) * self.size

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        num_new_computed_tokens=0,
        new_computed_blocks=None,
        num_lookahead_tokens=0,
        is_loaded=False,
    ):
        """Blocks for hit and new tokens and those ahead, or None."""
        pool = self.block_pool
        hit = list(new_computed_blocks.blocks[0]) if new_computed_blocks else []
        table = self.tables.get(request.request_id, [])
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        more = max(0, -(-(end + num_lookahead_tokens) // self.size) - len(table) - len(hit))
        if more > len(pool.free) - sum(block.ref_cnt == 0 for block in hit):
            return None
        for block in hit:
            if block.ref_cnt == 0:
                pool.free.remove(block)
            block.ref_cnt += 0 if has_fault("no-count") and block.ref_cnt else 1
        table = self.tables[request.request_id] = table + hit + [pool.take() for _ in range(more)]
        if not is_loaded:
            self.keep(request, end)
        return SimpleNamespace(blocks=(table,))

    def keep(self, request, end):
        for place, prefix in enumerate(request.hasher(request.all_token_ids[:end])):
            self.block_pool.keep(prefix, self.tables[request.request_id][place])

    def get_block_ids(self, request_id):
        return ([block.block_id for block in self.tables[request_id]],)

    def free(self, request):
        """Its blocks, the last first; those that nobody can find are given out before all others."""
        table = self.tables.pop(request.request_id)[::-1]
        for block in table[1:] if has_fault("leak") else table:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.block_id in self.block_pool.prefix_of:
                self.block_pool.free.append(block)
            elif block.ref_cnt == 0:
                self.block_pool.free.appendleft(block)
        if has_fault("free-twice"):
            self.block_pool.free.append(table[0])

    def reset_prefix_cache(self):
        if len(self.block_pool.free) != len(self.block_pool.blocks) - 1:
            return False
        if not has_fault("no-reset"):
            self.block_pool.by_prefix.clear()
            self.block_pool.prefix_of.clear()
        return True
