"""The counter of loaded layers."""

import torch


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
