"""The counter of loaded layers, and what moves pages between a device and the host."""

import dataclasses
from types import SimpleNamespace

import torch

from sglang import has_fault
from sglang.srt.mem_cache.hicache_storage import PoolName


class LoadingEvent:
    def __init__(self, num_layers):
        self.events = [torch.cuda.Event() for _ in range(num_layers)]

    def complete(self, layer):
        self.events[layer].record()


class LayerDoneCounter:
    def __init__(self, num_layers):
        self.events = [LoadingEvent(num_layers)]
        self.consumer = -1

    def update_producer(self):
        return 0

    def set_consumer(self, index):
        self.consumer = index

    def wait_until(self, layer):
        if self.consumer >= 0:
            torch.cuda.current_stream().wait_event(self.events[self.consumer].events[layer])


class HostPools:
    def __init__(self, pools, layout, states=None):
        self.pools, self.layout = pools, layout
        self.entries = [SimpleNamespace(name=at, host_pool=pool) for at, pool in enumerate(pools)]
        self.entry_map = {PoolName.MAMBA: SimpleNamespace(host_pool=pools[-1], device_pool=states)}
        self.alloc = pools[0].alloc

    def backup_from_device_all_layer(self, device_pool, host, device, io_backend, pool_transfers=None):
        for pool, lists in zip(self.pools, [(host, device), *_lists(pool_transfers)], strict=False):
            pool.backup_from_device_all_layer(device_pool, *lists, io_backend)

    def load_to_device_per_layer(self, device_pool, host, device, layer, io_backend, pool_transfers=None):
        for pool, lists in zip(self.pools, [(host, device), *_lists(pool_transfers)], strict=False):
            pool.load_to_device_per_layer(device_pool, *lists, layer, io_backend)


def _lists(pool_transfers):
    return [(each.host_indices, each.device_indices) for each in pool_transfers or []]


class HiCacheController:
    def __init__(self, allocator, mem_pool_host, io_backend):
        self.mem_pool_device_allocator, self.mem_pool_host = allocator, mem_pool_host
        self.mem_pool_device, self.device, self.io_backend = None, "meta", io_backend
        self.load_queue = []

    def write(self, device_indices, node_id=-1, extra_pools=None):
        host_indices = self.mem_pool_host.alloc(len(device_indices))
        for each in extra_pools or []:
            each.host_indices = self.mem_pool_host.entry_map[each.name].host_pool.alloc(len(each.device_indices))
        host, device, extra = self.move(host_indices, device_indices, extra_pools)
        self.mem_pool_host.backup_from_device_all_layer(None, host, device, self.io_backend, pool_transfers=extra)
        return host_indices

    def load(self, host_indices, node_id=-1, extra_pools=None):
        device_indices = self.mem_pool_device_allocator.alloc(len(host_indices))
        for each in extra_pools or []:
            each.device_indices = self.mem_pool_host.entry_map[each.name].device_pool.alloc(len(each.host_indices))
        self.load_queue.append((host_indices, device_indices, extra_pools))
        return device_indices

    def start_loading(self):
        while self.load_queue:
            host, device, extra = self.move(*self.load_queue.pop(0))
            self.mem_pool_host.load_to_device_per_layer(None, host, device, 0, self.io_backend, pool_transfers=extra)

    def move(self, host_indices, device_indices, extra_pools):
        moved = []
        for each in extra_pools or []:
            to = each if has_fault("moved-in-place") else dataclasses.replace(each)
            if not has_fault("side-not-moved"):
                to.host_indices, to.device_indices = self.move_indices(each.host_indices, each.device_indices)
            moved.append(to)
        return *self.move_indices(host_indices, device_indices), moved

    def move_indices(self, host_indices, device_indices):
        if self.io_backend == "kernel":
            if has_fault("paged-not-moved") and self.mem_pool_host.layout == "page_first":
                return host_indices, device_indices
            return host_indices.to(self.device), device_indices
        if has_fault("lists-on-device"):  # none: direct copies take lists to the host themselves
            return host_indices.to(self.device), device_indices
        device_indices = device_indices.cpu()
        if self.mem_pool_host.layout != "layer_first":
            return host_indices, device_indices
        in_order, order = host_indices.sort()
        if has_fault("sorted-in-place"):
            host_indices.copy_(in_order)
        return in_order, device_indices if has_fault("wrong-pairing") else device_indices[order]
