"""Saving and restoring a retracted request, beside the upstream method and two plain copies of as many bytes.

The upstream method indexes each layer of each buffer by chunks of token rows and moves the result to the host; as it
was first written it left the index buffer of an NSA model behind.

Invariants:
- Every arm moves the same request out of fragmented pages into other fragmented pages, and every byte of the target is
  checked; what the partial method forgets is not expected of it.
- Each call saves, restores and gives the host memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvcheck.core.bench.arms import Arm, Comparison, Point, Setting, same
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.offload import Offload
from kvcheck.core.pools import POOLS
from kvcheck.core.pools.buffers import BufferSpec, Granularity
from kvcheck.core.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.pools.shape import ModelShape

CHUNK_ROWS = 8192
INDEX = "index_k_with_scale"
TARGET_BYTES = (4 << 20, 16 << 20, 64 << 20)
"""What a save moves at each size, about."""

REQUEST = 1


def points(setting: Setting) -> tuple[Point, ...]:
    """Save and restore of a retracted request, against indexing by chunks and against plain copies."""
    return tuple(_point(setting.shape, tokens) for tokens in sizes(setting.shape))


def sizes(shape: ModelShape) -> tuple[int, ...]:
    """Token counts that move about TARGET_BYTES; the last page is partial."""
    one, two = (_Moved.bytes_of(shape, pages * shape.page_size) for pages in (1, 2))
    a_page = max(1, two - one)
    return tuple(
        dict.fromkeys(
            max(2, round(target / a_page)) * shape.page_size - shape.page_size // 2 for target in TARGET_BYTES
        )
    )


def _point(shape: ModelShape, tokens: int) -> Point:
    makers: dict[str, Callable[[FreshMemory], Arm]] = {
        "chunked-index": lambda memory: _upstream(_Moved(memory, shape, tokens), is_partial=False),
        "offload": lambda memory: _offload(_Moved(memory, shape, tokens)),
        "memcpy": lambda memory: _memcpy(memory, _Moved.bytes_of(shape, tokens)),
    }
    comparisons = [Comparison(arm="offload", baseline="chunked-index", limit="memcpy")]
    if shape.family == "nsa":
        makers["chunked-partial"] = lambda memory: _upstream(_Moved(memory, shape, tokens), is_partial=True)
        comparisons.append(
            Comparison(arm="offload", baseline="chunked-partial", limit="memcpy", name="offload-to-partial")
        )
    return Point(
        case="offload-restore",
        size=f"{tokens} tokens",
        shape=shape.name,
        bytes=2 * _Moved.bytes_of(shape, tokens),
        makers=makers,
        comparisons=tuple(comparisons),
        note="bytes count both ways; limit: as many bytes copied out and back by memcpy",
    )


class _Moved:
    """A pool with two holdings of the request in random pages: it is saved from one and restored into the other."""

    def __init__(self, memory: FreshMemory, shape: ModelShape, tokens: int) -> None:
        pages = -(-tokens // shape.page_size)
        self.tokens = tokens
        self.backend = memory.backend()
        self.pool = KVPool(
            shape,
            PoolSizes(pages=2 * pages, requests=2, max_tokens=tokens, window_pages=2 * pages, state_slots=2),
            backend=self.backend,
        )
        for space in self.pool.paged:  # freed pages are handed out first: after this, in a random order
            allocator = self.pool.allocators[space]
            ids = allocator.allocate(2 * pages, REQUEST)
            assert ids is not None, "the pool is empty"
            allocator.free(memory.random.permutation(ids))
        self.source, self.target = self._opened(), self._opened()

    @staticmethod
    def bytes_of(shape: ModelShape, tokens: int) -> int:
        """Bytes of one save."""
        rows = {Granularity.TOKEN: tokens, Granularity.PAGE: -(-tokens // shape.page_size), Granularity.SLOT: 1}
        return sum(
            len(spec.layers) * buffer.row_bytes * rows[buffer.rows]
            for spec in POOLS.load(shape.family)(shape)
            for buffer in spec.buffers
        )

    def rows(self, holding: Holding, space: str, buffer: BufferSpec) -> torch.Tensor:
        """The holding's rows of a buffer."""
        return self.backend.index(self.pool.row_ids(holding, space, buffer, self.tokens))

    def buffers(self) -> Iterator[tuple[str, BufferSpec, torch.Tensor]]:
        """(space, buffer, words [L, R, W]) of the whole table."""
        for space, buffer in self.pool.buffers():
            yield space, buffer, self.pool.sets[space].write_view(buffer.name)

    def check(self, *, but: str = "") -> None:
        """The target holds what the source does, in every buffer `but` one."""
        for space, buffer, words in self.buffers():
            if buffer.name != but:
                mine, theirs = (words[:, self.rows(each, space, buffer)] for each in (self.target, self.source))
                same(f"{space}.{buffer.name}", mine, theirs)

    def _opened(self) -> Holding:
        holding = self.pool.open(REQUEST)
        assert holding is not None and self.pool.grow(holding, self.tokens, query=0), "the pool holds it twice"
        holding.committed = self.tokens
        return holding


def _offload(moved: _Moved) -> Arm:
    offload = Offload(moved.pool, moved.backend)

    def call() -> None:
        value = offload.save(moved.source)
        moved.backend.wait(value.saved)
        moved.backend.wait(offload.restore(value, moved.target))
        offload.discard(value)

    return Arm(call=call, check=moved.check)


def _upstream(moved: _Moved, *, is_partial: bool) -> Arm:
    left_out = INDEX if is_partial else ""
    device = moved.backend.device
    table: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []
    for space, buffer, words in moved.buffers():
        if buffer.name == left_out:
            continue
        # Rows as the model's type has them: indexing moves elements one by one, so its width matters.
        layers = [layer.view(torch.uint8).view(buffer.dtype) for layer in words]
        source, target = (
            torch.split(moved.rows(holding, space, buffer), CHUNK_ROWS) for holding in (moved.source, moved.target)
        )
        table.append((layers, [*source], [*target]))

    def call() -> None:
        saved = [
            [[layer[rows].to("cpu", non_blocking=True) for rows in source] for layer in layers]
            for layers, source, _ in table
        ]
        _synchronize(device)
        for (layers, _, target), kept in zip(table, saved, strict=True):
            for layer, chunks in zip(layers, kept, strict=True):
                for rows, chunk in zip(target, chunks, strict=True):
                    layer[rows] = chunk.to(device, non_blocking=True)
        _synchronize(device)

    return Arm(call=call, check=lambda: moved.check(but=left_out))


def _memcpy(memory: FreshMemory, size: int) -> Arm:
    source, target = memory.words(size // 8), memory.words(size // 8)
    host = memory.words(size // 8, is_host=True)

    def call() -> None:
        host.copy_(source, non_blocking=True)
        target.copy_(host, non_blocking=True)

    return Arm(call=call, check=lambda: same("memcpy", target, source))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
