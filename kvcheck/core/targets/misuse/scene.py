"""Scene: a few small parts of an engine's own classes and shape, in a known state, where misuse may be prepared.

    requests of the pool    1: two pages, saved    2: one page    3: nothing yet    4: closed, its row is free

Invariants:
- The parts are those of the engine under test; their backend is their own, so no schedule sees what they do.
- Each legal call leaves the scene as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.targets.parts import TargetParts

PAGES, ROWS, LONGEST = 7, 4, 3
"""Pages and rows of the pool; pages of its longest request."""


class StillBackend(EagerBackend):
    """Runs operations at once and counts what it is asked for. is_pending: it says that no signal is reached.

    pending: signals that are not reached. waited: who waited, a lane or the process (None), wait by wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acts = 0
        self.is_pending = False
        self.pending: list[Signal] = []
        self.waited: list[Lane | None] = []

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

    def record(self, signal: Signal, *, lane: Lane) -> None:
        self.acts += 1
        super().record(signal, lane=lane)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        self.waited.append(lane)
        super().wait(signal, lane=lane)

    def query(self, signal: Signal) -> bool:
        return not (self.is_pending or any(each is signal for each in self.pending))


class Count:
    """An AllocationListener that counts."""

    def __init__(self) -> None:
        self.acts = 0

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        self.acts += 1

    def freed(self, space: str, ids: IndexArray) -> None:
        self.acts += 1


class Scene:
    """A pool with requests in several states, and the offloaded value of one."""

    def __init__(self, parts: TargetParts, shape: ModelShape) -> None:
        self.parts, self.shape = parts, shape
        self.backend, self.count = StillBackend(), Count()
        self.page = shape.page_size
        self.sizes = PoolSizes(
            pages=PAGES,
            requests=ROWS,
            max_tokens=LONGEST * self.page,
            window_pages=PAGES if shape.window_layers else 0,
        )
        self.pool = self.make_pool(self.sizes)
        self.offload: Offload = parts.offload(self.pool, self.backend, listener=self.count)
        self.one = self._opened(1, 2)
        self.two = self._opened(2, 1)
        self.none = self._opened(3, 0)
        self.closed = self._opened(4, 2)
        self.pool.close(self.closed)
        self.pool.commit(self.one, 2 * self.page - 1)
        self.pool.commit(self.two, self.page)

    def make_pool(self, sizes: PoolSizes, **changes: object) -> KVPool:
        """A pool on a backend of its own, of the shape with some changes."""
        backend = StillBackend() if hasattr(self, "pool") else self.backend
        return self.parts.pool(
            varied(self.shape, **changes), sizes, backend=backend, listener=self.count, buffers=self.parts.buffers
        )

    @cached_property
    def saved(self) -> OffloadedKV:
        """A value of request 1, saved when it is first asked for."""
        with self.preparing():
            return self.offload.save(self.one)

    @cached_property
    def dropped(self) -> OffloadedKV:
        """Another one, which was dropped."""
        with self.preparing():
            value = self.offload.save(self.one)
            self.offload.discard(value)
        return value

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """What is done inside prepares a call and does not count as done by it."""
        before = self.backend.acts, self.count.acts
        try:
            yield
        finally:
            self.backend.acts, self.count.acts = before

    def _opened(self, request: int, pages: int) -> Holding:
        holding = self.pool.open(request)
        assert holding is not None and self.pool.grow(holding, pages * self.page, query=0)
        return holding

    def kept(self) -> object:
        """What no refused call may change."""
        held = (self.one, self.two, self.none, self.closed)
        each = tuple((h.committed, len(h.pages), len(h.window_pages), h.shared, h.is_open) for h in held)
        return self.backend.acts, self.count.acts, each


def ids(*values: int) -> IndexArray:
    """Ids as the pool takes them."""
    return np.array(values, dtype=np.int64)


V = TypeVar("V")


def varied(value: V, **changes: object) -> V:
    """A value, such as a holding that nobody was given, which differs from a real one in these fields."""
    return replace(value, **changes)  # type: ignore[type-var]
