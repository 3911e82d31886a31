"""Legal ways in which a reader of a layer waits for its load, for pools with `loaded`, an event a layer, and `stream`.

Invariants:
- Each is enough on a device too: none of them relies on when something runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def poll(pool: Any, layer: int) -> None:
    while not pool.loaded[layer].query():
        pass


def poll_stream(pool: Any, layer: int) -> None:
    while not pool.stream.query():
        pass


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
