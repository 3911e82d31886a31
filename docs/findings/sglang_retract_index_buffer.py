"""SGLang: a retracted NSA/DSA request is resumed with another request's index keys (sgl-project/sglang #23346).

ENV/bin/python docs/findings/sglang_retract_index_buffer.py      exit 1: the bug is there
"""

import sys

import on_cpu
import torch

torch.cuda.synchronize = lambda *_: None
from sglang.srt.mem_cache import memory_pool  # noqa: E402

on_cpu.publish()
Pool = getattr(memory_pool, "NSATokenToKVPool", None) or memory_pool.DSATokenToKVPool
sizes = {"size": 256, "page_size": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "kv_cache_dim": 80, "layer_num": 1}
pool = Pool(**sizes, dtype=torch.bfloat16, index_head_dim=128, device="cpu", enable_memory_saver=False)
index, latent = pool.get_index_k_with_scale_buffer(0), pool.get_key_buffer(0)
old, new = torch.arange(64, 128), torch.arange(128, 192)  # page 1, then page 2
index[1], latent[old] = 11, 11  # the request's content
saved = pool.get_cpu_copy(old)
index[:], latent[:] = 22, 22  # retracted: another request uses all pages
pool.load_cpu_copy(saved, new)
came = bool((index[2] == 11).all())
print("latent rows came back:", bool((latent[new] == 11).all()), "  index page came back:", came)
sys.exit(not came)
