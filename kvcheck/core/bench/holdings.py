"""TwoHoldings: a pool with two holdings of one request in random pages, to compare the bytes moved between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcheck.core.base.paging import locs_of
from kvcheck.core.bench.arms import same
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape

REQUEST = 1


class TwoHoldings:
    def __init__(self, memory: FreshMemory, shape: ModelShape, tokens: int) -> None:
        pages = -(-tokens // shape.page_size)
        self.tokens = tokens
        self.backend = memory.backend()
        self.pool = KVPool(
            shape,
            PoolSizes(pages=2 * pages, requests=2, max_tokens=tokens, window_pages=2 * pages, state_slots=2),
            backend=self.backend,
        )
        for space in self.pool.paged:  # freed pages are allocated first: after this, in a random order
            allocator = self.pool.allocators[space]
            ids = allocator.allocate(2 * pages, REQUEST)
            assert ids is not None, "the pool is empty"
            allocator.free(memory.random.permutation(ids))
        self.source, self.target = self._opened(), self._opened()

    @staticmethod
    def bytes_of(shape: ModelShape, tokens: int) -> int:
        rows = {Granularity.TOKEN: tokens, Granularity.PAGE: -(-tokens // shape.page_size), Granularity.SLOT: 1}
        return sum(
            len(spec.layers) * buffer.row_bytes * rows[buffer.rows]
            for spec in POOLS.load(shape.family)(shape)
            for buffer in spec.buffers
        )

    def rows(self, holding: Holding, space: str, buffer: BufferSpec) -> torch.Tensor:
        return self.backend.index(self.pool.extent(holding, self.tokens).rows(space, buffer))

    def whole_rows(self, holding: Holding, space: str, buffer: BufferSpec) -> torch.Tensor:
        """Rows of all its pages, to the end of the last."""
        units = self.pool.extent(holding, self.tokens).units[space]
        if buffer.rows is not Granularity.TOKEN:
            return self.backend.index(units)
        size = self.pool.page_size
        return self.backend.index(locs_of(units, 0, len(units) * size, size))

    def buffers(self) -> Iterator[tuple[str, BufferSpec, torch.Tensor]]:
        """Yield (space, buffer, words [L, R, W]) of the whole table."""
        for space, buffer in self.pool.buffers():
            yield space, buffer, self.pool.sets[space].write_view(buffer.name)

    def check(self, *, but: str = "") -> None:
        """Raise WrongOutput unless the target holds the bytes of the source in every buffer except `but`."""
        for space, buffer, words in self.buffers():
            if buffer.name != but:
                mine, theirs = (words[:, self.rows(each, space, buffer)] for each in (self.target, self.source))
                same(f"{space}.{buffer.name}", mine, theirs)

    def _opened(self) -> Holding:
        holding = self.pool.open(REQUEST)
        assert holding is not None and self.pool.grow(holding, self.tokens, query=0), "the pool holds it twice"
        self.pool.commit(holding, self.tokens)
        return holding
