"""SGLang: metadata that land late on one rank make the ranks' queues differ (sgl-project/sglang #23252).

ENV/bin/python docs/findings/sglang_status_before_metadata.py    exit 1: the queues differ after a poll
"""

import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import on_cpu
import torch
from sglang.srt.disaggregation import decode, utils
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.utils import check_mooncake_custom_mem_pool_enabled as asked

on_cpu.publish()
more = {"max_sampling_mask_tokens": 8} if "mask" in str(inspect.signature(utils.MetadataBuffers)) else {}
brought, meet = {}, threading.Barrier(2, timeout=20)


def all_reduce(tensor, op, group):
    brought[group] = tensor.clone()
    meet.wait()
    tensor.copy_(torch.minimum(brought[0], brought[1]))


def waiting_after_a_poll(*rooms):  # both ranks were told Success; what has landed in either one's slot
    queues = [on_cpu.bare(decode.DecodeTransferQueue, gloo_group=rank, tp_rank=rank) for rank in range(2)]
    for queue, room in zip(queues, rooms, strict=True):
        own = {"metadata_buffers": utils.MetadataBuffers(1, 32, torch.bfloat16, **more), "enable_staging": False}
        own["metadata_buffers"].bootstrap_room[0, 0] = room
        prompt = Mock(bootstrap_room=7, return_logprob=False, return_sampling_mask=False)
        own["queue"] = [decode.DecodeRequest(prompt, Mock(poll=lambda: 4), metadata_buffer_index=0)]
        vars(queue).update(own, spec_algorithm=Mock(), req_to_metadata_buffer_idx_allocator=Mock())
        vars(queue).update(scheduler=Mock(enable_decode_hicache=False, kv_checksum_computer=None))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda queue: queue.pop_transferred(), queues))
    return [len(queue.queue) for queue in queues]


torch.distributed.all_reduce, torch.distributed.get_world_size = all_reduce, lambda *_: 2
assert waiting_after_a_poll(7, 7) == [0, 0], "cannot drive"
waiting, engine, args = waiting_after_a_poll(7, 0), Mock(), Mock(aux_data_ptrs=[id(meet)], aux_item_lens=[8])
conn.envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.set("INTRA_NODE_NVLINK")
sender = on_cpu.bare(conn.MooncakeKVManager, engine=engine, kv_args=args, send_aux_data_to_endpoint=Mock())
sender.enable_custom_mem_pool, sender.custom_mem_pool_type = asked()
sender.send_aux(Mock(mooncake_session_id="peer", dst_aux_index=0), 0, [8])
late = engine.batch_transfer_sync.called  # by socket they come in front of the status, and cannot be late
print("waiting after a poll:", waiting, "; metadata go by", "the copy engine" if late else "socket")
sys.exit(int(late and waiting[0] != waiting[1]))
