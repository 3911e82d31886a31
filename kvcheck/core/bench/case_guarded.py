"""Case: read rows of a pool through the gate that waits for a layer's load, compared with reading the tensor directly.

All arms gather equal rows of the same layers, on the pool's forward lane, for which guarded reads wait. "behind-load"
reads after a load that the process has not seen finish, so every read queries its events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcheck.core.bench.arms import Arm, ArmComparison, BenchSetting, Point, same
from kvcheck.core.bench.clock import nothing
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Operation
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.pool import KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape

ROWS = 1024
"""Token rows of one layer's read: 8 requests of 128 tokens."""


def points(setting: BenchSetting) -> tuple[Point, ...]:
    return tuple(_point(setting.shape, name, layers) for name, layers in (("one layer", 1), ("all layers", None)))


def _point(shape: ModelShape, size: str, layers: int | None) -> Point:
    count = min(layers or shape.num_layers, len(shape.full_layers))
    makers: dict[str, Callable[[FreshMemory], Arm]] = {
        "unguarded": lambda memory: _arm(memory, shape, count, guard=""),
        "guarded": lambda memory: _arm(memory, shape, count, guard="idle"),
        "guarded-behind-load": lambda memory: _arm(memory, shape, count, guard="loading"),
    }
    return Point(
        case="guarded-read",
        size=size,
        shape=shape.name,
        bytes=count * ROWS * _pool_row_bytes(shape),
        makers=makers,
        comparisons=tuple(ArmComparison(arm=arm, baseline="unguarded") for arm in ("guarded", "guarded-behind-load")),
        note=f"{ROWS} token rows a layer",
    )


def _pool_row_bytes(shape: ModelShape) -> int:
    full = next(spec for spec in POOLS.load(shape.family)(shape) if spec.name == "full")
    return full.buffers[0].row_bytes


def _arm(memory: FreshMemory, shape: ModelShape, layers: int, *, guard: str) -> Arm:
    backend = memory.backend()
    pages = -(-ROWS // shape.page_size)
    pool = KVPool(
        shape, PoolSizes(pages=pages, requests=1, max_tokens=ROWS, window_pages=1, state_slots=1), backend=backend
    )
    lane, owner = pool.forward, pool.sets["full"]
    name = owner.spec.buffers[0].name
    gate = LayerGate(backend, lanes=2, layers=shape.num_layers)
    pool.connect(gate)
    rows = backend.index(memory.permutation(shape.page_size, ROWS))
    words = owner.write_view(name)
    out = memory.words(ROWS, words.shape[2])
    if guard == "loading":
        of_layer = dict(zip(owner.spec.layers, words, strict=True))
        queue_load(backend, gate, [_load(of_layer.get(layer)) for layer in range(shape.num_layers)])

    def gather(source: torch.Tensor) -> None:
        torch.index_select(source, 0, rows, out=out)

    def bare(layer: int) -> None:
        backend.launch(lane, gather, words[layer])

    def guarded(layer: int) -> None:
        backend.launch(lane, gather, owner.read_view(name, (layer,), lane)[layer])

    read = guarded if guard else bare

    def call() -> None:
        for layer in range(layers):
            read(layer)

    def check() -> None:
        same("rows of the last layer", out, words[layers - 1].index_select(0, rows))
        for layer in range(layers):
            read(layer)
            backend.drain()
            same(f"rows of layer {layer}", out, words[layer].index_select(0, rows))

    return Arm(call=call, check=check, clock="events")


def _load(words: torch.Tensor | None) -> ChunkWork:
    if words is None:
        return nothing
    kept = words.clone()
    words.zero_()

    def run() -> None:
        words.copy_(kept)

    return run


def queue_load(backend: Backend, gate: LayerGate, layers: Sequence[ChunkWork]) -> None:
    """Queue a load of all layers that the process has not seen finish. layers: the load of each."""
    lanes = backend.lane("load"), backend.lane("load.side")
    producer = gate.begin()
    assert producer is not None, "the ring is empty"
    backend.drain()  # wait for the wipes
    for layer, work in enumerate(layers):
        backend.submit(Operation("bench.load", (work,)), lane=lanes[0])
        gate.layer_done(producer, layer, lanes)
    gate.consume([producer])
