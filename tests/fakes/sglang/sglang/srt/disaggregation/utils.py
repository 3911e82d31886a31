"""Metadata of a transfer, and its slots."""

import torch

from sglang import has_fault


class ReqToMetadataIdxAllocator:
    def __init__(self, size):
        self.free_slots = list(range(size))

    def alloc(self):
        return self.free_slots.pop(0) if self.free_slots else None

    def free(self, index):
        self.free_slots.append(index)


class MetadataBuffers:
    def __init__(self, size, hidden_size, hidden_states_dtype):
        self.output_ids = torch.zeros((size, 16), dtype=torch.int32)
        self.output_hidden_states = torch.zeros((size, hidden_size), dtype=hidden_states_dtype)
        self.bootstrap_room = torch.zeros((size, 8), dtype=torch.int64)

    def get_buf_infos(self):
        fields = self.output_ids, self.output_hidden_states, self.bootstrap_room
        return (
            [each.data_ptr() for each in fields],
            [each.nbytes for each in fields],
            [each[0].nbytes for each in fields],
        )

    def get_buf(self, idx):
        rows = self.output_ids[idx], self.output_hidden_states[idx], self.bootstrap_room[idx]
        if has_fault("row-remembered"):
            return self.__dict__.setdefault("rows", {}).setdefault(idx, tuple(row.clone() for row in rows))
        return rows if has_fault("views") else tuple(row.clone() for row in rows)

    def set_buf(self, req):
        self.output_ids[req.metadata_buffer_index, 0] = req.output_ids[0]
        self.output_hidden_states[req.metadata_buffer_index] = req.hidden_states_tensor
        self.bootstrap_room[req.metadata_buffer_index, 0] = req.bootstrap_room
