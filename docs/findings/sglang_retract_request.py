"""SGLang: the same through the request, its allocator and its row, as a scheduler does (sgl-project/sglang #23346).

ENV/bin/python docs/findings/sglang_retract_request.py           exit 1: it resumes with another's keys, or not at all
"""

import sys

import on_cpu
import torch

torch.cuda.synchronize = lambda *_: None
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.mem_cache import allocator, memory_pool  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

on_cpu.publish()
Pool = getattr(memory_pool, "NSATokenToKVPool", None) or memory_pool.DSATokenToKVPool
sizes = {"size": 256, "page_size": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "kv_cache_dim": 80, "layer_num": 1}
pool = Pool(**sizes, dtype=torch.bfloat16, index_head_dim=128, device="cpu", enable_memory_saver=False)
pages = allocator.PagedTokenToKVPoolAllocator(256, 64, torch.bfloat16, "cpu", pool, need_sort=False)
rows = memory_pool.ReqToTokenPool(2, 256, "cpu", enable_memory_saver=False)
index, latent = pool.get_index_k_with_scale_buffer(0), pool.get_key_buffer(0)
request = Req("first", "", list(range(1, 64)), SamplingParams(max_new_tokens=8))
request.output_ids.extend((7, 8))  # 65 tokens; the last has no KV yet
(row,) = rows.alloc([request])
old = pages.alloc(64)
rows.write((row, slice(0, 64)), old.to(torch.int32))
index[old[0] // 64], latent[old] = 11, 11  # the request's content
try:
    request.offload_kv_cache(rows, pages)
except TypeError as error:  # the request passes what its own pool does not take (sgl-project/sglang #25828)
    sys.exit(f"the request cannot be saved at all: {error}")
pages.free(old)
index[:], latent[:] = 22, 22  # retracted: another request uses all pages
new = pages.alloc(128)[64:]
rows.write((row, slice(0, 64)), new.to(torch.int32))
request.load_kv_cache(rows, pages)
came = bool((index[new[0] // 64] == 11).all())
print("latent rows came back:", bool((latent[new] == 11).all()), "  index page came back:", came)
sys.exit(not came)
