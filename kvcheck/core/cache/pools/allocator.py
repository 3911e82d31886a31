"""Allocators of pages, tokens and slots.

Invariants:
- free + live = all at any time. Id 0 of a device pool is never allocated.
- The order of ids depends on the calls alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LengthMismatch
from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.events import Allocated, Emit, Freed

FEW = 64
"""Most ids for which a loop is faster than an array."""


class Use:
    """Ids that a queued operation touches. is_reached: True once it has run."""

    __slots__ = ("ids", "is_reached")

    def __init__(self, ids: IndexArray, is_reached: Callable[[], bool]) -> None:
        self.ids = ids
        self.is_reached = is_reached


class IdAllocator:
    """Allocates ids first .. first + count - 1: the lowest first, freed ids last (FIFO)."""

    def __init__(self, space: str, *, count: int, first: int = 1, emit: Emit | None = None) -> None:
        self.space = space
        self.count = count
        self._free: deque[int] = deque(range(first, first + count))
        self._live = np.zeros(first + count, dtype=bool)
        self._owners = np.zeros(first + count, dtype=np.int64)
        self._pins = np.zeros(first + count, dtype=np.int64)
        self._uses: list[Use] = []
        self._emit = emit

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        return self.count - len(self._free)

    def allocate(self, count: int, owner: int) -> IndexArray | None:
        """Allocate `count` ids; None, with nothing changed, if fewer are free."""
        if count < 0:
            raise LengthMismatch(f"{self.space}: expected a count of at least 0, got {count}")
        if count > len(self._free):
            return None
        ids = np.array([self._free.popleft() for _ in range(count)], dtype=np.int64)
        self._live[ids] = True
        self._owners[ids] = owner
        if self._emit is not None and count:
            self._emit(Allocated(self.space, tuple(ids.tolist()), owner))
        return ids

    def free(self, ids: IndexArray) -> None:
        """Free ids, all or none. Raise like `check_freeable`."""
        if not len(ids):
            return
        self.check_freeable(ids)
        self._live[ids] = False
        self._put_back(ids)
        if self._emit is not None:
            self._emit(Freed(self.space, tuple(ids.tolist())))

    def check_freeable(self, ids: IndexArray) -> None:
        """Raise DoubleFree for an id that is not allocated or named twice, FreeInFlight for a pinned one."""
        if not len(ids):
            return
        if not self._are_live(ids) or len(set(ids.tolist())) != len(ids):
            raise DoubleFree(f"{self.space}: freed {ids.tolist()}, of which some are not allocated or named twice")
        if self._pins[ids].any():
            self._drop_reached(ids)
        if self._pins[ids].any():
            raise FreeInFlight(f"{self.space}: freed {ids.tolist()} while pinned: {ids[self._pins[ids] > 0].tolist()}")

    def turn(self, by: int) -> None:
        """Move the first `by` free ids behind the others, as in a pool that has served before."""
        self._free.rotate(-by)

    def owner_of(self, unit: int) -> int | None:
        """Return the owner's request; None for an id that is free or does not exist."""
        is_live = 0 <= unit < len(self._live) and self._live[unit]
        return int(self._owners[unit]) if is_live else None

    def check_live(self, ids: IndexArray) -> None:
        if not self._are_live(ids):
            raise ForeignAccess(f"{self.space}: used {ids.tolist()}, of which some are not allocated")

    def check_owned(self, ids: IndexArray, owner: int) -> None:
        self.check_live(ids)
        if (wrong := self._owners[ids] != owner).any():
            unit = int(ids[wrong][0])
            raise ForeignAccess(
                f"{self.space}: {unit} was used for request {owner} and belongs to request {self._owners[unit]}"
            )

    def check_owner(self, unit: int, owner: int) -> None:
        if not (0 <= unit < len(self._live) and self._live.item(unit) and self._owners.item(unit) == owner):
            self.check_owned(np.array([unit], dtype=np.int64), owner)

    def pin(self, ids: IndexArray) -> None:
        """Keep ids from being freed until `unpin`. An id named twice is pinned twice."""
        if not self._are_live(ids):
            raise DoubleFree(f"{self.space}: pinned {ids.tolist()}, of which some are not allocated")
        np.add.at(self._pins, ids, 1)

    def unpin(self, ids: IndexArray) -> None:
        """Undo one `pin`, all or nothing."""
        each, times = np.unique(ids, return_counts=True)
        if len(each) and (each[0] < 0 or each[-1] >= len(self._pins) or (self._pins[each] < times).any()):
            raise LengthMismatch(f"{self.space}: unpinned {ids.tolist()}, of which some are not pinned")
        self._pins[each] -= times

    def hold(self, ids: IndexArray, is_reached: Callable[[], bool]) -> Use:
        """Pin ids for a queued operation until `drop`, or until they are freed after `is_reached` has become True."""
        self.pin(ids)
        use = Use(ids.copy(), is_reached)
        self._uses.append(use)
        return use

    def drop(self, use: Use) -> None:
        if use in self._uses:
            self._uses.remove(use)
            self.unpin(use.ids)

    def _drop_reached(self, ids: IndexArray) -> None:
        for use in [use for use in self._uses if np.isin(use.ids, ids).any()]:
            if use.is_reached():
                self.drop(use)

    def _are_live(self, ids: IndexArray) -> bool:
        """True if `ids` is [n] int64 and each is allocated. Plain indexing would also take -1, floats and masks."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise LengthMismatch(f"{self.space}: expected ids [n] of int64, got {ids.shape} of {ids.dtype}")
        if len(ids) > FEW:
            return bool(ids.min() >= 0 and ids.max() < len(self._live) and self._live[ids].all())
        is_live, count = self._live.item, len(self._live)
        return all(0 <= unit < count and is_live(unit) for unit in ids.tolist())

    def _put_back(self, ids: IndexArray) -> None:
        self._free.extend(ids.tolist())


class SlotAllocator(IdAllocator):
    """Request rows, metadata slots, state slots: FIFO, so a freed slot is reused as late as possible."""


class PageAllocator(IdAllocator):
    """Pages of `page_size` tokens. Freed pages are reused first, as in the paged allocators of serving engines."""

    def __init__(self, space: str, *, count: int, page_size: int, emit: Emit | None = None) -> None:
        super().__init__(space, count=count, emit=emit)
        self.page_size = page_size

    def needed(self, *, held: int, tokens: int) -> int:
        return max(0, pages_for(tokens, self.page_size) - held)

    def _put_back(self, ids: IndexArray) -> None:
        self._free.extendleft(reversed(ids.tolist()))
