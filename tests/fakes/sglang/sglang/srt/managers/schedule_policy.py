"""Who is admitted."""

import enum

from sglang import has_fault


class AddReqResult(enum.Enum):
    CONTINUE = 0
    NO_TOKEN = 1


class PrefillAdder:
    def __init__(self, page_size, tree_cache, token_to_kv_pool_allocator, rem_chunk_tokens):
        self.page, self.tree, self.slots, self.chunk = (
            page_size,
            tree_cache,
            token_to_kv_pool_allocator,
            rem_chunk_tokens,
        )
        self.can_run_list, self.new_chunked_req, self.taken = [], None, 0

    def cut(self, req):
        room = self.chunk // self.page * self.page
        is_cut = len(req.fill_ids) - len(req.prefix_indices) > room
        if is_cut:
            req.fill_ids = req.fill_ids[: len(req.prefix_indices) + room]
        self.chunk -= len(req.fill_ids) - len(req.prefix_indices)
        self.taken += len(req.fill_ids) - len(req.prefix_indices) + self.page
        self.can_run_list.append(req)
        return is_cut

    def add_chunked_req(self, req):
        return req if self.cut(req) else None

    def add_one_req(self, req, has_chunked_req, truncation_align_size):
        total, used = (
            len(req.fill_ids) + req.sampling_params.max_new_tokens,
            self.slots.size - self.tree.evictable_size(),
        )
        if has_fault("long-ones-run-alone") and total > 13 and self.slots.available_size() < used:
            return AddReqResult.NO_TOKEN
        self.tree.lock(req.last_node, 1)
        room = self.slots.available_size() + self.tree.evictable_size() - self.taken
        if self.chunk < self.page or len(req.fill_ids) - len(req.prefix_indices) + 2 * self.page > room:
            self.tree.lock(req.last_node, -1)
            return AddReqResult.NO_TOKEN
        if self.cut(req):
            self.new_chunked_req = req
        return AddReqResult.CONTINUE
