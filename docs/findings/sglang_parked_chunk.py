"""SGLang: a chunk that found no room in the window pool is cached as if it had been computed (upstream #24252).

ENV/bin/python docs/findings/sglang_parked_chunk.py [unified]    exit 1: the bug is there
"""

import sys

import on_cpu
import torch
from sglang.srt.managers import schedule_batch, schedule_policy
from sglang.srt.sampling.sampling_params import SamplingParams

on_cpu.publish()
tree = on_cpu.window_tree(16)
slots, rows = tree.token_to_kv_pool_allocator, tree.req_to_token_pool
request = schedule_batch.Req("A", "", on_cpu.prompt(range(1, 13)), SamplingParams(max_new_tokens=1))
request.init_next_round_input(tree)
on_cpu.extend(request, 0, 8)  # its first chunk, of 8 tokens
request.swa_uuid_for_lock = getattr(tree.inc_lock_ref(request.last_node), "swa_uuid_for_lock", None)
rows.alloc([request])
rows.write((request.req_pool_idx, slice(0, 8)), slots.alloc(8).to(torch.int32))
tree.cache_unfinished_req(request, chunked=True)  # stash_chunked_request of the scheduler
slots.alloc(8)  # other requests have the other half of the window pool
request.init_next_round_input()
adder = schedule_policy.PrefillAdder(1, tree, slots, None, 0.1, 4096, 8)
waits = adder.add_chunked_req(request) is request and not adder.can_run_list
print("A waits for room:", waits)
if waits:
    tree.cache_unfinished_req(request, chunked=True)  # what the scheduler does first in its next round
cached = len(request.prefix_indices)
print(f"8 tokens of A are computed; the tree has {cached}, in {request.prefix_indices.tolist()}")
sys.exit(cached > 8)
