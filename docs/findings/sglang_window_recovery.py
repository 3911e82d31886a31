"""SGLang: who brings a node its window back frees full-attention pages that a running request reads (upstream #29352).

ENV/bin/python docs/findings/sglang_window_recovery.py [unified] exit 1: the bug is there; releases with SWARadixCache
"""

import sys

import on_cpu
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams

on_cpu.publish()
tree = on_cpu.window_tree(32)
slots, rows = tree.token_to_kv_pool_allocator, tree.req_to_token_pool


def prefill(name, tokens, *cuts):  # in chunks, as the scheduler stashes them
    request = Req(name, "", on_cpu.prompt(tokens), SamplingParams())
    request.init_next_round_input(tree)
    lock = tree.inc_lock_ref(request.last_node)
    request.swa_uuid_for_lock = getattr(lock, "swa_uuid_for_lock", lock)
    rows.alloc([request])
    for start, end in zip((0, *cuts), cuts, strict=False):
        on_cpu.extend(request, start, end)
        rows.write((request.req_pool_idx, slice(start, end)), slots.alloc(end - start).to(torch.int32))
        tree.cache_unfinished_req(request, chunked=end < cuts[-1])
    return request


first = prefill("A", [*range(20)], 12, 20)  # runs on; what its window needs is locked, and all pages of full attention
tree.evict(EvictParams(num_tokens=0, swa_num_tokens=12))  # the first 12 tokens lose their windows
prefill("B", [*range(12), 99], 13)  # shares them, computes them again
lost = set(rows.req_to_token[first.req_pool_idx, :20].tolist()) & set(slots.full_attn_allocator.free_pages.tolist())
print(f"of 20 tokens that A reads, {len(lost)} are free: {sorted(lost)}")
sys.exit(bool(lost))
