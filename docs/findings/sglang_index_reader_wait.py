"""SGLang: readers of the NSA index buffer do not wait for the load of their layer (sgl-project/sglang #22811).

ENV/bin/python docs/findings/sglang_index_reader_wait.py         exit 1: the bug is there
"""

import inspect
import sys

import on_cpu
import torch
from sglang.srt.mem_cache import memory_pool

on_cpu.publish()
Pool = getattr(memory_pool, "NSATokenToKVPool", None) or memory_pool.DSATokenToKVPool
sizes = {"size": 256, "page_size": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "kv_cache_dim": 80, "layer_num": 1}
pool = Pool(**sizes, dtype=torch.bfloat16, index_head_dim=128, device="cpu", enable_memory_saver=False)
index = pool.get_index_k_with_scale_buffer(0)
load = type("Load", (), {"wait_until": lambda self, layer: index[1].fill_(11)})()  # completes when it is waited for
pool.register_layer_transfer_counter(load)
page, size = torch.tensor([1], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
bad = 0
for name in ("get_index_k_continuous", "get_index_k_scale_continuous", "get_index_k_scale_buffer"):
    if not hasattr(pool, name):  # a release that has no such reader has no bug in it
        continue
    batched = "seq_len_tensor" in inspect.signature(getattr(pool, name)).parameters
    index[1] = 22  # what was there before the load
    read = getattr(pool, name)(0, *((size, page[None], 64, 64) if batched else (64, page)))
    seen = int((read if isinstance(read, torch.Tensor) else read[0]).flatten()[0])
    print(name, "saw", seen, "and the load brings 11")
    bad += seen != 11
sys.exit(bad > 0)
