"""The controller of copies between the tiers."""

from collections import namedtuple

import torch

from sglang import has_fault
from sglang.srt.managers.cache_controller import LayerDoneCounter

HiCacheAck = namedtuple("HiCacheAck", "start_event finish_event node_ids")


class CopyController:
    def __init__(self, allocator, mem_pool_host, io_backend):
        self.allocator, self.mem_pool_host, self.io_backend = allocator, mem_pool_host, io_backend
        self.layers = allocator.kvcache.layer_num
        self.layer_done_counter = LayerDoneCounter(self.layers)
        allocator.kvcache.register_layer_transfer_counter(self.layer_done_counter)
        self.write_stream, self.load_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self.write_fence_stream = self.load_fence_stream = None
        self.ack_write_queue, self.ack_load_queue, self.load_queue = [], [], []

    def write(self, device_indices, node_id):
        host = self.mem_pool_host.alloc(len(device_indices))
        if host is None:
            return None
        start, finish = torch.cuda.Event(), torch.cuda.Event()
        start.record()
        if self.write_fence_stream is not None and not has_fault("fence-ignored"):
            self.write_stream.wait_stream(self.write_fence_stream)
        with torch.cuda.stream(self.write_stream):
            start.wait(self.write_stream)
            if has_fault("early-ack"):
                finish.record()
            short = 1 if has_fault("list-too-short") and self.mem_pool_host.index else 0
            self.mem_pool_host.backup(host[short:], device_indices)
            if has_fault("list-changed") and self.mem_pool_host.index:
                device_indices.copy_(device_indices.flip(0))
            if not has_fault("early-ack"):
                finish.record()
        self.ack_write_queue.append(HiCacheAck(start, finish, [node_id]))
        return host

    def load(self, host_indices, node_id):
        device = self.allocator.alloc(len(host_indices))
        if device is not None:
            self.load_queue.append((host_indices, device, node_id))
        return device

    def start_loading(self):
        producer = self.layer_done_counter.update_producer()
        waits = has_fault("waits-on-load") and self.mem_pool_host.index
        event = self.layer_done_counter.events[producer]
        host = torch.cat([each[0] for each in self.load_queue])
        device = torch.cat([each[1] for each in self.load_queue])
        nodes = [each[2] for each in self.load_queue]
        self.load_queue = []
        start = torch.cuda.Event()
        start.record()
        if self.load_fence_stream is not None and not has_fault("load-overtakes"):
            self.load_stream.wait_stream(self.load_fence_stream)
        with torch.cuda.stream(self.load_stream):
            if not has_fault("load-overtakes"):
                start.wait(self.load_stream)
            for layer in range(self.layers):
                self.mem_pool_host.load(host, device, layer)
                event.complete(layer)
        if waits:
            torch.cuda.synchronize()
        self.ack_load_queue.append(HiCacheAck(start, event.events[-1], nodes[:1] if has_fault("ack-lost") else nodes))
        return producer

    def evict_host(self, indices):
        self.mem_pool_host.free(indices)
