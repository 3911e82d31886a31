"""Pools that load on a stream, with an event a layer, and the legal ways in which their readers wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcheck.testing import Judged, Streams, waits


def poll(pool: Any, layer: int) -> None:
    while not pool.loaded[layer].query():
        pass


def poll_stream(pool: Any, layer: int) -> None:
    while not pool.stream.query():
        pass


SLOTS, LAYERS = 13, 3


class Pool:
    """Loads on a stream, an event a layer; readers wait as `wait` says. put: where a tensor is made to lie."""

    def __init__(
        self,
        wait: Callable[[Any, int], object] | None = None,
        put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.k = [put(torch.zeros(SLOTS, 4)) for _ in range(LAYERS)]
        self.v = [put(torch.zeros(SLOTS, 4, dtype=torch.bfloat16)) for _ in range(LAYERS)]
        self.stream, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        self.loaded = [torch.cuda.Event() for _ in range(LAYERS)]
        self.wait = wait

    def save(self, ids: Any) -> Any:
        return [(k[ids], v[ids]) for k, v in zip(self.k, self.v, strict=True)]

    def load(self, copy: Any, ids: Any) -> None:
        for layer, (k, v) in enumerate(copy):
            with torch.cuda.stream(self.stream):
                self.k[layer][ids] = k
                self.v[layer].index_copy_(0, ids, v)
                self.loaded[layer].record(self.stream)

    def read(self, layer: int, ids: Any) -> Any:
        if self.wait is not None:
            self.wait(self, layer)
        return self.k[layer][ids], self.v[layer]


class ReadsOnItsStream(Pool):
    def read(self, layer: int, ids: Any) -> Any:
        with torch.cuda.stream(self.other):
            k, v = super().read(layer, ids)
            return k, v[ids] * 1


def judge(held: Streams, pool: Any, **options: Any) -> Judged:
    own = {"save": pool.save, "load": pool.load, "read": pool.read, "layers": LAYERS, "slots": SLOTS}
    return waits(pool, streams=held, **own | options)


WAITS: dict[str, Callable[[Any, int], object]] = {
    "the current stream waits for the event": lambda pool, layer: pool.loaded[layer].wait(),
    "named stream": lambda pool, layer: torch.cuda.current_stream().wait_event(pool.loaded[layer]),
    "the process waits for the event": lambda pool, layer: pool.loaded[layer].synchronize(),
    "the process waits for the stream": lambda pool, layer: pool.stream.synchronize(),
    "wait_stream": lambda pool, layer: torch.cuda.current_stream().wait_stream(pool.stream),
    "the process waits for all": lambda pool, layer: torch.cuda.synchronize(),
    "a later layer's event": lambda pool, layer: pool.loaded[-1].wait(),
    "asks the event again and again": poll,
    "asks the stream again and again": poll_stream,
}


def beside_save(not_tried: tuple[str, ...]) -> tuple[str, ...]:
    """What was not tried, but for a late copy of a save that puts nothing on a stream."""
    assert any(text.startswith("save:") for text in not_tried)
    return tuple(text for text in not_tried if not text.startswith("save:"))
