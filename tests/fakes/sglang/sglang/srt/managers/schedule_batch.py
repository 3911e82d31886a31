"""Requests, and batches of them."""

from types import SimpleNamespace

import torch

from sglang import has_fault
from sglang.srt.mem_cache.common import evict_for, release_kv_cache

if has_fault("import-breaks"):

    class InvalidVersion(ValueError):
        pass

    raise InvalidVersion("'N/A'")


class FINISH_ABORT:
    pass


class Req:
    extend_range = None

    def __init__(self, rid, origin_input_text, origin_input_ids, sampling_params):
        self.rid = rid
        self.origin_input_ids = origin_input_ids
        self.output_ids = []
        self.req_pool_idx = None
        self.hidden_states_tensor = None
        self.sampling_params = sampling_params
        self.to_finish = self.finished_reason = self.last_node = None
        self.is_chunked = self.owned = self.kv_len = 0

    @property
    def seqlen(self):
        return len(self.origin_input_ids) + len(self.output_ids)

    def set_extend_range(self, start, end):
        self.extend_range = SimpleNamespace(start=start, end=end)

    def finished(self):
        return self.finished_reason is not None

    def check_finished(self):
        if self.to_finish or len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = self.to_finish or "length"

    def init_next_round_input(self, tree_cache=None):
        self.fill_ids = self.origin_input_ids + self.output_ids
        if tree_cache is not None:
            self.prefix_indices, self.last_node = tree_cache.match(self.fill_ids[:-1])
            if has_fault("page-too-many"):
                self.prefix_indices = torch.cat((self.prefix_indices, self.prefix_indices[-tree_cache.page :]))
            self.owned = len(self.prefix_indices)

    def _tokens(self, rows):
        return rows.req_to_token[self.req_pool_idx, : self.seqlen - 1].long()

    def offload_kv_cache(self, rows, allocator):
        self.copy = allocator.get_cpu_copy(self._tokens(rows), mamba_indices=None)

    def load_kv_cache(self, rows, allocator):
        allocator.load_cpu_copy(self.copy, self._tokens(rows), mamba_indices=None)


class Mode:
    def __init__(self, extends):
        self.extends = extends

    def is_extend(self):
        return self.extends


class ScheduleBatch:
    def __init__(self, reqs, batch_is_full=False):
        self.reqs, self.batch_is_full, self.chunked_req = reqs, batch_is_full, None

    @classmethod
    def init_new(cls, reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, chunked_req):
        batch = cls(reqs)
        batch.rows, batch.slots, batch.tree = req_to_token_pool, token_to_kv_pool_allocator, tree_cache
        batch.chunked_req = chunked_req
        return batch

    def batch_size(self):
        return len(self.reqs)

    def is_empty(self):
        return not self.reqs

    def filter_batch(self, chunked_req_to_exclude=()):
        self.reqs = [req for req in self.reqs if not req.finished() and req not in chunked_req_to_exclude]

    def merge_batch(self, other):
        self.reqs = self.reqs + other.reqs

    def extend(self, req, start, end):
        page = self.tree.page
        first = -(-start // page) * page
        pages = -(-end // page) * page - first
        evict_for(self.tree, pages)
        fresh = self.slots.alloc(pages) if pages > 0 else torch.empty(0, dtype=torch.int64)
        if start < first:
            last = int(self.rows.req_to_token[req.req_pool_idx, start - 1])
            fresh = torch.cat((torch.arange(last + 1, last + 1 + first - start), fresh))
        self.rows.write((req.req_pool_idx, slice(start, end)), fresh[: end - start].int())
        req.kv_len = end

    def prepare_for_extend(self):
        self.forward_mode, self.prefix_lens = Mode(True), [len(req.prefix_indices) for req in self.reqs]
        if has_fault("rows-by-number"):
            for req, row in zip(self.reqs, self.rows.alloc(len(self.reqs)), strict=True):
                req.req_pool_idx = row
        else:
            always = has_fault("row-each-chunk")
            self.rows.alloc([req for req in self.reqs if always or req.req_pool_idx is None])
        for req, start in zip(self.reqs, self.prefix_lens, strict=True):
            self.rows.write((req.req_pool_idx, slice(0, start)), req.prefix_indices.int())
            self.extend(req, start, len(req.fill_ids))
        self.seq_lens_cpu = torch.tensor([len(req.fill_ids) for req in self.reqs])

    def check_decode_mem(self):
        needed = sum(self.tree.page for req in self.reqs if req.kv_len % self.tree.page == 0)
        evict_for(self.tree, needed)
        return self.slots.available_size() >= needed

    def retract_decode(self, server_args):
        gone = []
        while len(self.reqs) > 1 and (not gone or not self.check_decode_mem()):
            gone.append(self.reqs.pop())
            release_kv_cache(gone[-1], self.tree, is_insert=False)
        return gone, 0.5, []

    def prepare_for_decode(self):
        self.forward_mode = Mode(False)
        for req in self.reqs:
            self.extend(req, req.kv_len, req.kv_len + 1)
        self.seq_lens_cpu = torch.tensor([req.kv_len for req in self.reqs])
