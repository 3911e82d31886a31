"""A small pool with requests in several states, and a saved value of one, to make calls of that have to be refused.

request 1: two pages, saved    2: one page    3: nothing yet    4: closed; its row and pages are request 6's
        5: closed, its row is free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvcheck.core.base.errors import TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.stress.workload.shapes import shape

PAGES, ROWS, LONGEST = 7, 5, 3
"""Pages and rows of the pool; pages of its longest request."""


def ids(*values: int) -> IndexArray:
    return np.array(values, dtype=np.int64)


class CountingBackend(EagerBackend):
    acts = 0

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        self.acts += 1
        return super().empty(name, shape, dtype, place)

    def release(self, name: str) -> None:
        self.acts += 1
        super().release(name)

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        self.acts += 1
        return super().submit(operation, lane=lane, reads=reads, writes=writes, after=after)


def pool_of(name: str, *, requests: int = ROWS, **changes: int) -> KVPool:
    preset = shape(name)
    sizes = {"pages": PAGES, "max_tokens": LONGEST * preset.page_size}
    sizes["window_pages"] = PAGES if preset.window_layers else 0
    return KVPool(preset, PoolSizes(requests=requests, **(sizes | changes)), backend=CountingBackend())


class Scene:
    def __init__(self, name: str) -> None:
        self.pool = pool_of(name)
        self.page = self.pool.page_size
        self.offload = Offload(self.pool, self.pool.backend)
        self.one, self.two, self.none = self._opened(1, 2), self._opened(2, 1), self._opened(3, 0)
        self.past, self.gone = self._opened(4, 2), self._opened(5, 2)
        self.pool.close(self.past)
        self.heir = self._opened(6, 2)
        self.pool.close(self.gone)
        assert (self.heir.row, self.heir.pages.tolist()) == (self.past.row, self.past.pages.tolist())
        self.pool.commit(self.one, 2 * self.page - 1)
        self.pool.commit(self.two, self.page)
        self.saved, self.dropped = self.offload.save(self.one), self.offload.save(self.one)
        self.offload.discard(self.dropped)

    def _opened(self, request: int, pages: int) -> Holding:
        holding = self.pool.open(request)
        assert holding is not None and self.pool.grow(holding, pages * self.page, query=0)
        return holding

    def kept(self) -> object:
        """What no refused call may change."""
        held = (self.one, self.two, self.none, self.past, self.gone, self.heir)
        each = [(h.committed, h.pages.tolist(), h.window_pages.tolist(), h.shared, h.is_open) for h in held]
        free = [made.available for made in self.pool.allocators.values()]
        return self.pool.backend.acts, each, free  # type: ignore[attr-defined]

    def refuses(self, call: Callable[[Scene], object], error: type[TargetError]) -> None:
        before = self.kept()
        with pytest.raises(error):
            call(self)
        assert self.kept() == before
