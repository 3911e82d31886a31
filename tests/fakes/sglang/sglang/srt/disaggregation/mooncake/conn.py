"""Both sides of a transfer."""

import threading
from dataclasses import dataclass

from sglang import has_fault
from sglang.srt.disaggregation.base.conn import KVPoll


@dataclass
class TransferInfo:
    room: int
    endpoint: str
    dst_port: int
    mooncake_session_id: str
    dst_kv_indices: object
    dst_aux_index: int
    dst_state_indices: list


@dataclass
class TransferKVChunk:
    room: int
    prefill_kv_indices: object
    prefill_aux_index: int
    state_indices: list


@dataclass
class KVArgsRegisterInfo:
    mooncake_session_id: str
    dst_kv_ptrs: list
    dst_aux_ptrs: list
    dst_state_data_ptrs: list


class MooncakeKVManager:
    def transfer_worker(self, queue, executor):
        while True:
            chunk = queue.get()
            for info in self.transfer_infos[chunk.room].values():
                status = self.send(chunk, info)
                self.request_status[chunk.room] = status
                endpoint = f"tcp://{info.endpoint}:{info.dst_port}"
                self._connect(endpoint).send_multipart([str(chunk.room).encode(), str(status).encode()])

    def send(self, chunk, info):
        args, peer = self.kv_args, self.decode_kv_args_table[info.mooncake_session_id]
        ours, theirs = chunk.state_indices or [], info.dst_state_indices
        if len(ours) != len(theirs) and not has_fault("state-trims"):
            if has_fault("state-dies"):
                raise ValueError(f"operands of shapes {len(ours)} and {len(theirs)}")
            self.failure_records[chunk.room] = f"state lists of {len(ours)} and {len(theirs)} rows"
            return KVPoll.Failed
        slots = [chunk.prefill_aux_index], [info.dst_aux_index]
        legs = [
            (args.kv_data_ptrs, peer.dst_kv_ptrs, args.kv_item_lens, chunk.prefill_kv_indices, info.dst_kv_indices),
            (args.state_data_ptrs, peer.dst_state_data_ptrs, args.state_item_lens, ours, theirs),
            (args.aux_data_ptrs, peer.dst_aux_ptrs, args.aux_item_lens, *slots),
        ]
        if has_fault("metadata-turned"):
            legs[2] = (args.aux_data_ptrs[::-1], peer.dst_aux_ptrs[::-1], args.aux_item_lens[::-1], *slots)
        if has_fault("pages-last"):
            legs = legs[::-1]
        for leg, (froms, tos, sizes, sources, targets) in enumerate(legs):
            for start, end, size in zip(froms, tos, sizes, strict=True):
                for source, target in zip(sources, targets, strict=False):
                    where = [start + int(source) * size], [end + int(target) * size]
                    if self.engine.batch_transfer_sync(info.mooncake_session_id, *where, [size]):
                        if leg == 1 and has_fault("state-result-lost"):
                            continue
                        return KVPoll.Failed
        return KVPoll.Success

    def start_decode_thread(self):
        def receive():
            while True:
                room, status = self.server_socket.recv_multipart()
                self.request_status[int(room)] = int(status)

        threading.Thread(target=receive).start()
