"""SGLang: what a request left in its metadata slot makes the next one abort, where metadata come after the status.

ENV/bin/python docs/findings/sglang_reused_metadata_slot.py          exit 1: it is not committed, and nothing failed
"""

import sys
from unittest.mock import MagicMock

import on_cpu
import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.mooncake import conn

on_cpu.publish()
torch.distributed.all_reduce, torch.distributed.get_world_size = lambda *_, **__: None, lambda *_: 1
decode.release_kv_cache = lambda *_, **__: None
own = dict.fromkeys(("spec_algorithm", "req_to_metadata_buffer_idx_allocator", "_release_request"), MagicMock())
own |= {"scheduler": MagicMock(enable_decode_hicache=False, kv_checksum_computer=None), "enable_staging": False}
buffers = on_cpu.metadata_buffers(1)
queue = on_cpu.bare(decode.DecodeTransferQueue, **own, metadata_buffers=buffers, gloo_group=0, tp_rank=0, tree_cache=0)
route = {"enable_custom_mem_pool": True, "custom_mem_pool_type": "INTRA_NODE_NVLINK", "kv_args": MagicMock()}
socket = MagicMock()
on_cpu.bare(conn.MooncakeKVManager, **route, send_aux_tcp=socket).send_aux(MagicMock(), 0, [])


def poll_for(room):
    request = MagicMock(bootstrap_room=room, return_logprob=False, return_sampling_mask=False, finished_reason=None)
    told = MagicMock(poll=lambda: conn.KVPoll.Success)
    queue.queue = [decode.DecodeRequest(request, told, metadata_buffer_index=0)]
    return [len(queue.pop_transferred()), len(queue.queue)]


buffers.bootstrap_room[0, 0] = 7
assert poll_for(7) == [1, 0], "cannot drive"
buffers.bootstrap_room[0, 0] = 8 if socket.called else buffers.bootstrap_room[0, 0]  # a socket keeps their order
came = poll_for(8)
print("metadata by socket, in order:", socket.called, " committed, waiting:", came)
sys.exit(int(came == [0, 0]))
