"""Pools and the table of rows."""

import sgl_kernel
import torch

from sglang import has_fault
from sglang.srt.mem_cache.allocator import Slots


class ReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32)
        self.size = size
        if has_fault("rows-by-number"):
            self.alloc, self.free = self.alloc_count, self.free_number
        self.clear()

    def clear(self):
        first = 0 if has_fault("rows-by-number") else 1
        self.free_slots = list(range(first, self.size + first))

    def alloc_count(self, need_size):
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def free_number(self, free_index):
        self.free_slots.append(free_index)

    def alloc(self, reqs):
        for req in reqs:
            req.req_pool_idx = self.free_slots.pop(0)
        return [req.req_pool_idx for req in reqs]

    def free(self, req):
        self.free_slots.append(req.req_pool_idx)

    def write(self, indices, values):
        self.req_to_token[indices] = values


class HybridReqToTokenPool(ReqToTokenPool):
    def __init__(self, size, mamba_size, max_context_len, device, enable_memory_saver):
        super().__init__(size, max_context_len, device, enable_memory_saver)
        self.mamba_pool = Slots(mamba_size, device)


class KVCache:
    def __init__(self, size, page_size, layer_num):
        self.page_size = page_size
        self.layer_num = layer_num
        self.counter = None

    def register_layer_transfer_counter(self, counter):
        self.counter = counter

    def wait(self, layer_id):
        if self.counter is not None:
            self.counter.wait_until(layer_id)


def infos(tensors, rows=1):
    """Pointers, lengths and bytes of so many rows."""
    sizes = [each[0].nbytes * rows for each in tensors]
    return [each.data_ptr() for each in tensors], [each.nbytes for each in tensors], sizes


def synchronize(fault):
    if not has_fault(fault):
        torch.cuda.synchronize()


class MLATokenToKVPool(KVCache):
    def __init__(self, size, page_size, kv_lora_rank, dtype, qk_rope_head_dim, layer_num):
        super().__init__(size, page_size, layer_num)
        row = kv_lora_rank + qk_rope_head_dim
        self.kv_buffer = [torch.zeros((size + page_size, 1, row), dtype=dtype) for _ in range(layer_num)]

    def get_contiguous_buf_infos(self):
        return infos(self.kv_buffer, self.page_size)

    def move_kv_cache(self, tgt_loc, src_loc):
        for rows in self.kv_buffer:
            rows[tgt_loc] = rows[src_loc]


class MHATokenToKVPool(KVCache):
    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver):
        super().__init__(size, page_size, layer_num)
        shape = (size + page_size, head_num, head_dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layer_num)]

    def move_kv_cache(self, tgt_loc, src_loc):
        for rows in (*self.k_buffer, *self.v_buffer):
            rows[tgt_loc] = rows[src_loc]

    def get_key_buffer(self, layer_id):
        self.wait(layer_id)
        return self.k_buffer[layer_id]

    def get_kv_buffer(self, layer_id):
        self.wait(layer_id)
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def get_cpu_copy(self, indices, mamba_indices=None):
        if has_fault("plainest-raises"):
            raise RuntimeError("no copies today")
        synchronize("save-overtakes")
        return [(k[indices], v[indices]) for k, v in zip(self.k_buffer, self.v_buffer, strict=True)]

    def load_cpu_copy(self, copy, indices, mamba_indices=None):
        synchronize("restore-overtakes")
        for layer, (k, v) in enumerate(copy):
            self.k_buffer[layer][indices] = k
            self.v_buffer[layer][indices] = v


class NSATokenToKVPool(MLATokenToKVPool):
    def __init__(self, size, page_size, kv_lora_rank, dtype, qk_rope_head_dim, layer_num, index_head_dim):
        super().__init__(size, page_size, kv_lora_rank, dtype, qk_rope_head_dim, layer_num)
        page = page_size * (index_head_dim + 4)
        pages = (size + page_size) // page_size
        self.index_k = [torch.zeros((pages, page), dtype=torch.uint8) for _ in range(layer_num)]
        self.seen = torch.zeros((pages, 2)) if has_fault("scratch") else None

    def get_state_buf_infos(self):
        return infos(self.index_k)

    def move_kv_cache(self, tgt_loc, src_loc):
        super().move_kv_cache(tgt_loc, src_loc)
        if has_fault("pages-by-tokens"):
            tgt_loc, src_loc = tgt_loc % len(self.index_k[0]), src_loc % len(self.index_k[0])
        size = self.page_size
        for pages in self.index_k:
            if has_fault("pages-by-tokens"):
                pages[tgt_loc] = pages[src_loc]
                continue
            for part in (pages[:, : size * 128].view(-1, size, 128), pages[:, size * 128 :].view(-1, size, 4)):
                part[tgt_loc // size, tgt_loc % size] = part[src_loc // size, src_loc % size]

    def get_key_buffer(self, layer_id):
        if not has_fault("keys-no-wait" if layer_id != 1 else "middle-no-wait"):
            self.wait(layer_id)
        if has_fault("all-read-on-host"):
            self.kv_buffer[layer_id].cpu()
        return self.kv_buffer[layer_id]

    def get_index_buffer(self, layer_id):
        if not has_fault("no-wait"):
            self.wait(max(0, layer_id - 1) if has_fault("waits-for-layer-before") else layer_id)
        if has_fault("reads-on-host") or has_fault("all-read-on-host"):
            self.index_k[layer_id].cpu()
        return self.index_k[layer_id]

    def get_cpu_copy(self, indices, mamba_indices=None):
        if has_fault("stub-in-path"):
            sgl_kernel.copy_rows(self.kv_buffer, indices)
        if has_fault("family-raises") and len(indices) % self.page_size:
            raise RuntimeError("a last page in part")
        synchronize("save-overtakes")
        pages = indices[:: self.page_size] // self.page_size
        if has_fault("part-page-lost"):
            pages = pages[: len(indices) // self.page_size]
        if pages.tolist() == list(range(int(pages[0]), int(pages[-1]) + 1)):
            pages = slice(int(pages[0]), int(pages[-1]) + 1)  # a view, which a copy to the host leaves behind
        kept = [index[pages].to("cpu") for index in self.index_k]
        return [kv[indices] for kv in self.kv_buffer], None if has_fault("index-lost") else kept

    def load_cpu_copy(self, copy, indices, mamba_indices=None):
        synchronize("restore-overtakes")
        pages = indices[:: self.page_size] // self.page_size
        for layer in range(self.layer_num):
            self.kv_buffer[layer][indices] = copy[0][layer]
            if copy[1] is not None:
                self.index_k[layer][pages[: len(copy[1][layer])]] = copy[1][layer]


if has_fault("renamed"):
    del NSATokenToKVPool


class HybridLinearKVPool:
    def __init__(self, size, mamba_pool):
        self.mamba_pool = mamba_pool
