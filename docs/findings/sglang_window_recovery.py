"""SGLang: who brings a node its window back frees full-attention pages that a running request reads (upstream #29352).

ENV/bin/python docs/findings/sglang_window_recovery.py           exit 1: the bug is there; releases with SWARadixCache
"""

import sys
from array import array

import on_cpu
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import base_prefix_cache, cache_init_params, memory_pool, swa_memory_pool, swa_radix_cache
from sglang.srt.sampling.sampling_params import SamplingParams

on_cpu.publish()
sizes = {"size": 64, "size_swa": 32, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"}
layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1], "enable_kvcache_transpose": False}
pool = swa_memory_pool.SWAKVPool(**sizes, **layers, head_num=2, head_dim=8)
slots = swa_radix_cache.SWATokenToKVPoolAllocator(**sizes, kvcache=pool, need_sort=False)
rows = memory_pool.ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
params = cache_init_params.CacheInitParams(False, rows, slots, page_size=1, sliding_window_size=8)
tree = swa_radix_cache.SWARadixCache(params)


def prefill(name, prompt, *cuts):  # in chunks, as the scheduler stashes them
    request = Req(name, "", type(Req("", "", [], SamplingParams()).output_ids)(*KIND, prompt), SamplingParams())
    request.init_next_round_input(tree)
    lock = tree.inc_lock_ref(request.last_node)
    request.swa_uuid_for_lock = getattr(lock, "swa_uuid_for_lock", lock)
    rows.alloc([request])
    for start, end in zip((0, *cuts), cuts, strict=False):
        request.fill_ids, request.fill_len = request.origin_input_ids[:end], end
        rows.write((request.req_pool_idx, slice(start, end)), slots.alloc(end - start).to(torch.int32))
        tree.cache_unfinished_req(request, chunked=end < cuts[-1])
    return request


KIND = ("q",) if isinstance(Req("", "", [], SamplingParams()).output_ids, array) else ()
first = prefill("A", [*range(20)], 12, 20)  # runs on; what its window needs is locked, and all pages of full attention
tree.evict(base_prefix_cache.EvictParams(num_tokens=0, swa_num_tokens=12))  # the first 12 tokens lose their windows
prefill("B", [*range(12), 99], 13)  # shares them, computes them again
lost = set(rows.req_to_token[first.req_pool_idx, :20].tolist()) & set(slots.full_attn_allocator.free_pages.tolist())
print(f"of 20 tokens that A reads, {len(lost)} are free: {sorted(lost)}")
sys.exit(bool(lost))
