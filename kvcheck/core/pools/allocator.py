"""Allocators of pages, tokens and slots: who owns which id, and what may be freed now.

Invariants:
- free + live = all, at every moment; id 0 of a device pool is never handed out.
- Freeing an id that is not allocated raises DoubleFree; freeing a pinned id raises FreeInFlight.
- The order is a function of the calls alone.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from kvcheck.core.errors import DoubleFree, FreeInFlight, LengthMismatch
from kvcheck.core.paging import IndexArray, pages_for


class AllocationListener(Protocol):
    """What an onlooker of an allocator is told."""

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        """`ids` now belong to request `owner`."""

    def freed(self, space: str, ids: IndexArray) -> None:
        """`ids` are free."""


class IdAllocator:
    """Hands out ids first .. first + count - 1, lowest waiting id first, freed ids last (FIFO)."""

    def __init__(self, space: str, *, count: int, first: int = 1, listener: AllocationListener | None = None) -> None:
        self.space = space
        self.count = count
        self._free: deque[int] = deque(range(first, first + count))
        self._live = np.zeros(first + count, dtype=bool)
        self._pins = np.zeros(first + count, dtype=np.int64)
        self._listener = listener

    @property
    def available(self) -> int:
        """Ids that can be handed out now."""
        return len(self._free)

    @property
    def live(self) -> int:
        """Ids that are handed out now."""
        return self.count - len(self._free)

    def allocate(self, count: int, owner: int) -> IndexArray | None:
        """`count` ids, or None where fewer are free; then nothing has changed."""
        if count > len(self._free):
            return None
        ids = np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)
        self._live[ids] = True
        if self._listener is not None and count:
            self._listener.allocated(self.space, ids, owner)
        return ids

    def free(self, ids: IndexArray) -> None:
        """Give ids back. All or nothing: raises before anything changes."""
        if not len(ids):
            return
        self.check_freeable(ids)
        self._live[ids] = False
        self._put_back(ids)
        if self._listener is not None:
            self._listener.freed(self.space, ids)

    def check_freeable(self, ids: IndexArray) -> None:
        """Raise DoubleFree or FreeInFlight where `free` would."""
        if not len(ids):
            return
        if (
            len(np.unique(ids)) != len(ids)
            or ids.min() < 0
            or ids.max() >= len(self._live)
            or not self._live[ids].all()
        ):
            raise DoubleFree(f"{self.space}: freed {ids.tolist()}, of which some are not allocated or named twice")
        if self._pins[ids].any():
            raise FreeInFlight(f"{self.space}: freed {ids.tolist()} while pinned: {ids[self._pins[ids] > 0].tolist()}")

    def pin(self, ids: IndexArray) -> None:
        """Keep ids from being freed until `unpin`, while a copy uses them."""
        if not self._live[ids].all():
            raise DoubleFree(f"{self.space}: pinned {ids.tolist()}, of which some are not allocated")
        self._pins[ids] += 1

    def unpin(self, ids: IndexArray) -> None:
        """Undo one `pin`."""
        if (self._pins[ids] < 1).any():
            raise LengthMismatch(f"{self.space}: unpinned {ids.tolist()}, of which some are not pinned")
        self._pins[ids] -= 1

    def _put_back(self, ids: IndexArray) -> None:
        self._free.extend(ids.tolist())


class SlotAllocator(IdAllocator):
    """Request rows, metadata slots, state slots: FIFO, so a freed slot is reused as late as possible."""


class PageAllocator(IdAllocator):
    """Pages of `page_size` tokens: freed pages are reused first, as the field's paged allocators do."""

    def __init__(self, space: str, *, count: int, page_size: int, listener: AllocationListener | None = None) -> None:
        super().__init__(space, count=count, listener=listener)
        self.page_size = page_size

    def needed(self, *, held: int, tokens: int) -> int:
        """Pages to add to `held` pages so that `tokens` tokens fit."""
        return max(0, pages_for(tokens, self.page_size) - held)

    def _put_back(self, ids: IndexArray) -> None:
        self._free.extendleft(reversed(ids.tolist()))


class TokenAllocator(PageAllocator):
    """Single tokens: a PageAllocator whose pages hold one token."""

    def __init__(self, space: str, *, count: int, listener: AllocationListener | None = None) -> None:
        super().__init__(space, count=count, page_size=1, listener=listener)
