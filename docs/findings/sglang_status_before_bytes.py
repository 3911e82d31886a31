"""SGLang: two ranks are told Success, and the bytes of one have not landed yet (sgl-project/sglang #23252).

exit 1: queues differ. "pages": or pages lack at a commit. "default": not by NVLink, by the default route (#26394)."""

import sys
from unittest.mock import MagicMock

import on_cpu
import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.mooncake import conn

on_cpu.publish()
shared = dict.fromkeys(("scheduler", "spec_algorithm", "req_to_metadata_buffer_idx_allocator"), MagicMock())
shared["scheduler"].configure_mock(enable_decode_hicache=False, kv_checksum_computer=None)
route = {"enable_custom_mem_pool": "default" not in sys.argv, "custom_mem_pool_type": "INTRA_NODE_NVLINK"}
route |= {"kv_args": MagicMock(), "_transfer_data": MagicMock()}


def all_reduce(tensor, op, group):  # the group keeps what the late rank brings, which comes first and has the least
    tensor.copy_(torch.minimum(tensor, group.setdefault(len(tensor), tensor.clone())))


def waits_after_a_poll(group, room):  # room: what has landed in this rank's metadata, 0 where nothing has
    buffers, told = on_cpu.metadata_buffers(1), MagicMock(poll=lambda: conn.KVPoll.Success)
    buffers.bootstrap_room[0, 0] = room
    request = MagicMock(bootstrap_room=7, return_logprob=False, return_sampling_mask=False)
    own = {"queue": [decode.DecodeRequest(request, told, metadata_buffer_index=0)], "metadata_buffers": buffers}
    queue = on_cpu.bare(decode.DecodeTransferQueue, **shared, **own, gloo_group=group, tp_rank=0, enable_staging=False)
    queue.pop_transferred()
    return bool(queue.queue)


torch.distributed.all_reduce, torch.distributed.get_world_size = all_reduce, lambda *_: 2
assert not waits_after_a_poll({}, 7), "cannot drive"
group, socket = {}, MagicMock()
on_cpu.bare(conn.MooncakeKVManager, **route, send_aux_tcp=socket).send_aux(MagicMock(), 0, [])
late, early = waits_after_a_poll(group, 7 if socket.called else 0), waits_after_a_poll(group, 7)
print("metadata by socket, in order:", socket.called, " the late rank waits:", late, " the early rank waits:", early)
sys.exit(int(late != early or (not late and "pages" in sys.argv)))
