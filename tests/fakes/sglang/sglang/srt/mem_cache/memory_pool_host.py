"""Memory on the host: rows of tokens, and of pages where the pool has an index; copied by the driver."""

from dataclasses import dataclass

import torch
from sgl_kernel.kvcacheio import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

from sglang import has_fault
from sglang.srt.managers.cache_controller import HostPools


@dataclass
class PoolEntry:
    name: str
    host_pool: object
    device_pool: object
    is_primary_index_anchor: bool = False


class HostPoolGroup(HostPools):
    def __init__(self, entries):
        pools = [entry.host_pool for entry in entries]
        super().__init__(pools, pools[0].layout, entries[-1].device_pool)


class HostPool:
    def __init__(self, device_pool, ratio, page_size, layout):
        self.device_pool, self.page_size, self.layout = device_pool, page_size, layout
        rows = getattr(device_pool, "k_buffer", None) or device_pool.kv_buffer
        self.page_num = int((len(rows[0]) - page_size) * ratio) // page_size + 1
        self.size = self.page_num * page_size
        self.several = hasattr(device_pool, "v_buffer")
        inner = (len(rows), self.size) if layout == "layer_first" else (self.page_num, len(rows), page_size)
        shape = ((2,) if self.several else ()) + inner + tuple(rows[0].shape[1:])
        self.kv_buffer = torch.empty(shape, dtype=rows[0].dtype)
        self.index = []
        for index in getattr(device_pool, "index_k", ()):
            self.index.append(torch.empty((self.page_num, index.shape[1]), dtype=torch.uint8))
        self.free_slots = torch.arange(self.size)

    def alloc(self, count):
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken

    def free(self, indices):
        self.free_slots = torch.cat((self.free_slots, indices))

    def buffers(self):
        """(device layers, host memory) of each buffer of rows."""
        if self.several:
            return [(self.device_pool.k_buffer, self.kv_buffer[0]), (self.device_pool.v_buffer, self.kv_buffer[1])]
        return [(self.device_pool.kv_buffer, self.kv_buffer)]

    def first(self, indices):
        return indices[:: self.page_size] // self.page_size

    def backup(self, host, device):
        lists = {"src_indices": device, "dst_indices": host, "page_size": self.page_size}
        layers = [layer for devices, _ in self.buffers() for layer in devices]
        if self.layout == "layer_first":
            into = [layer for _, memory in self.buffers() for layer in memory]
            transfer_kv_direct(src_layers=layers, dst_layers=into, **lists)
        else:
            into = [memory for _, memory in self.buffers()]
            transfer_kv_all_layer_direct_lf_pf(src_ptrs=layers, dst_ptrs=into, **lists)
        if self.index and not has_fault("index-not-backed-up"):
            transfer_kv_direct(
                src_layers=self.device_pool.index_k,
                dst_layers=self.index,
                src_indices=self.first(device),
                dst_indices=self.first(host),
                page_size=1,
            )

    def load(self, host, device, layer):
        lists = {"src_indices": host, "dst_indices": device, "page_size": self.page_size}
        into = [devices[layer] for devices, _ in self.buffers()]
        if self.layout == "layer_first":
            transfer_kv_direct(src_layers=[memory[layer] for _, memory in self.buffers()], dst_layers=into, **lists)
        else:
            memories = [memory for _, memory in self.buffers()]
            transfer_kv_per_layer_direct_pf_lf(src_ptrs=memories, dst_ptrs=into, layer_id=layer, **lists)
        if self.index:
            transfer_kv_direct(
                src_layers=[self.index[layer]],
                dst_layers=[self.device_pool.index_k[layer]],
                src_indices=self.first(host),
                dst_indices=self.first(device),
                page_size=1,
            )
