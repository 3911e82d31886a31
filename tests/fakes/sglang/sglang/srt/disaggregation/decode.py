"""A decode rank's queue."""

from dataclasses import dataclass

import torch

from sglang import has_fault
from sglang.srt.disaggregation.base.conn import KVPoll


@dataclass
class DecodeRequest:
    req: object
    kv_receiver: object
    metadata_buffer_index: int


def release_kv_cache(req):
    """Nothing is aborted here."""


class DecodeTransferQueue:
    def pop_transferred(self):
        rooms = self.metadata_buffers.bootstrap_room
        ready = [int(rooms[entry.metadata_buffer_index, 0]) != 0 for entry in self.queue]
        polls = [entry.kv_receiver.poll() for entry in self.queue]
        if not has_fault("no-gate") and not has_fault("gate-of-one-rank"):
            polls = [
                poll if there else min(poll, KVPoll.Transferring) for poll, there in zip(polls, ready, strict=True)
            ]
        tensor = torch.tensor(polls)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=self.gloo_group)
        done = []
        for entry, poll, there in zip(self.queue, tensor.tolist(), ready, strict=True):
            if poll == KVPoll.Success and (there or not has_fault("gate-of-one-rank")):
                output_ids = self.metadata_buffers.get_buf(entry.metadata_buffer_index)[0]
                entry.req.output_ids.append(int(output_ids[0]))
                done.append(entry)
        for entry in done:
            self.queue.remove(entry)
            if not has_fault("room-kept"):
                rooms[entry.metadata_buffer_index] = 0
            self.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)
        return [entry.req for entry in done]
