"""SGLang: a request that brings a node its window back frees the full-attention pages that a running request reads.

ENV/bin/python docs/findings/sglang_window_recovery.py           exit 1: the bug is there
"""

import sys

import on_cpu
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import memory_pool, swa_memory_pool, swa_radix_cache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.sampling.sampling_params import SamplingParams

on_cpu.publish()
sizes = {"size": 64, "size_swa": 32, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"}
layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1], "enable_kvcache_transpose": False}
pool = swa_memory_pool.SWAKVPool(**sizes, **layers, head_num=2, head_dim=8)
allocator = swa_radix_cache.SWATokenToKVPoolAllocator(**sizes, kvcache=pool, need_sort=False)
rows = memory_pool.ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
tree = swa_radix_cache.SWARadixCache(CacheInitParams(False, rows, allocator, page_size=1, sliding_window_size=8))


def prefill(name, prompt, cuts):
    """Chunks, as a scheduler computes and stashes them."""
    request = Req(name, "", prompt, SamplingParams(max_new_tokens=8))
    request.init_next_round_input(tree)
    lock = tree.inc_lock_ref(request.last_node)
    request.swa_uuid_for_lock = getattr(lock, "swa_uuid_for_lock", lock)
    rows.alloc([request])
    print(name, "finds", len(request.prefix_indices), "of its tokens")
    for end in cuts:
        start = len(request.prefix_indices)
        request.fill_ids, request.fill_len = prompt[:end], end
        rows.write((request.req_pool_idx, slice(0, start)), request.prefix_indices.to(torch.int32))
        rows.write((request.req_pool_idx, slice(start, end)), allocator.alloc(end - start).to(torch.int32))
        tree.cache_unfinished_req(request, chunked=end < cuts[-1])
    return request


shared = list(range(1, 13))
first = prefill("A", shared + list(range(20, 28)), (12, 20))  # runs on; its window is its last 8 tokens
tree.evict(EvictParams(num_tokens=0, swa_num_tokens=12))  # room in windows: the shared 12 tokens lose theirs
prefill("B", shared + [30], (13,))
read = rows.req_to_token[first.req_pool_idx, :20].tolist()
lost = sorted(set(read) & set(allocator.full_attn_allocator.free_pages.tolist()))
print("A reads tokens", read, "of which are free now", lost)
sys.exit(bool(lost))
