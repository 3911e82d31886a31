"""A KV pool in plain torch, as a fork might have one, and the same with one of three bugs."""

import torch


class Pool:
    """Keys and values of two layers, scales of quantised keys, and a stream on which requests come back."""

    def __init__(self, slots=61, layers=2, heads=2, dim=8):
        self.k = [torch.zeros(slots, heads, dim, dtype=torch.int8) for _ in range(layers)]
        self.v = [torch.zeros(slots, heads, dim, dtype=torch.bfloat16) for _ in range(layers)]
        self.k_scale = [torch.zeros(slots, heads) for _ in range(layers)]
        self.free_slots = torch.arange(1, slots)

    def save(self, ids):
        return [(k[ids], v[ids], scale[ids]) for k, v, scale in zip(self.k, self.v, self.k_scale)]

    def load(self, copy, ids):
        for layer, (k, v, scale) in enumerate(copy):
            self.k[layer][ids] = k
            self.v[layer][ids] = v
            self.k_scale[layer][ids] = scale


class PoolWithoutScale(Pool):
    """Bug: k_scale came later, and nobody added it to save and load."""

    def save(self, ids):
        return [(k[ids], v[ids]) for k, v in zip(self.k, self.v)]

    def load(self, copy, ids):
        for layer, (k, v) in enumerate(copy):
            self.k[layer][ids] = k
            self.v[layer][ids] = v


class Metadata:
    """First tokens and hidden states on their way from prefill to decode, a row a request."""

    def __init__(self, rows=4, hidden=16):
        self.token = torch.zeros(rows, 1, dtype=torch.int64)
        self.hidden = torch.zeros(rows, hidden)

    def put(self, row, token, hidden):
        self.token[row] = token
        self.hidden[row] = hidden

    def get(self, row):
        return {"token": self.token[row].clone(), "hidden": self.hidden[row].clone()}


class MetadataOfViews(Metadata):
    """Bug: what get returns is a part of the buffer."""

    def get(self, row):
        return {"token": self.token[row].clone(), "hidden": self.hidden[row]}


class StreamedPool(Pool):
    """Loads layer by layer on a stream of its own. A reader waits for its layer."""

    def __init__(self):
        super().__init__()
        self.stream = torch.cuda.Stream()
        self.loaded = [torch.cuda.Event() for _ in self.k]

    def load(self, copy, ids):
        with torch.cuda.stream(self.stream):
            for layer, (k, v, scale) in enumerate(copy):
                self.k[layer][ids] = k
                self.v[layer][ids] = v
                self.k_scale[layer][ids] = scale
                self.loaded[layer].record()

    def keys(self, layer, ids):
        self.loaded[layer].wait()
        return self.k[layer][ids], self.k_scale[layer][ids]

    def values(self, layer, ids):
        self.loaded[layer].wait()
        return self.v[layer][ids]


class StreamedPoolWithoutWait(StreamedPool):
    """Bug: the reader of keys came later, and does not wait."""

    def keys(self, layer, ids):
        return self.k[layer][ids], self.k_scale[layer][ids]
