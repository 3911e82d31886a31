"""Misuse of allocators: ids that are free, foreign, pinned, named twice, out of range or no ids at all.

Invariants:
- Rows for an engine's own allocators ask for nothing that polls: a pinned id is freed on the scene's allocators alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LengthMismatch, TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import ids

OWNER, FOREIGN = 7, 8


@dataclass(frozen=True, slots=True)
class Owned:
    """Ids of one allocator: held by an owner; held by another request; free; the last one, held by the owner too."""

    allocator: IdAllocator
    first: int
    held: int
    pinned: int
    free: int
    foreign: int
    last: int

    @property
    def beyond(self) -> int:
        """One above the highest id."""
        return self.last + 1

    def kept(self) -> object:
        """What no refused call may change."""
        each = self.allocator
        return each.available, each.pins, each.owner_of(self.held), each.owner_of(self.foreign)


def owned(first: int) -> Owned:
    """Five ids: held, pinned once, given back, foreign, held."""
    made = IdAllocator("misused", count=5, first=first)
    taken = [made.allocate(1, owner) for owner in (OWNER, OWNER, OWNER, FOREIGN, OWNER)]
    held, pinned, free, foreign, last = (int(each[0]) for each in taken if each is not None)
    made.free(ids(free))
    made.pin(ids(pinned))
    return Owned(made, first, held, pinned, free, foreign, last)


def _lists(subject: Owned) -> dict[str, IndexArray]:
    """Lists that no method takes for ids of the owner, by what is wrong with them."""
    return {
        "a free id": ids(subject.held, subject.free),
        "an id below the first": ids(subject.first - 1),
        "the id -1": ids(-1),
        "an id above the last": ids(subject.held, subject.beyond),
    }


def _shapeless(subject: Owned) -> dict[str, IndexArray]:
    """Arrays that plain indexing would take, and that are no list of ids."""
    return {
        "ids as floats": np.array([float(subject.held)]),
        "a mask": np.ones(subject.beyond, dtype=bool),
        "ids of int32": np.array([subject.held], dtype=np.int32),
        "a single id": np.array(subject.held),
        "ids in two rows": np.array([[subject.held], [subject.last]]),
    }


METHODS: dict[str, tuple[type[TargetError], Callable[[IdAllocator, IndexArray], object]]] = {
    "free": (DoubleFree, IdAllocator.free),
    "check_freeable": (DoubleFree, IdAllocator.check_freeable),
    "check_live": (ForeignAccess, IdAllocator.check_live),
    "check_owned": (ForeignAccess, lambda each, wrong: each.check_owned(wrong, OWNER)),
    "pin": (DoubleFree, IdAllocator.pin),
    "hold": (DoubleFree, lambda each, wrong: each.hold(wrong, lambda: True)),
}


def _of_list(method: str, what: str, subject: Owned) -> object:
    return METHODS[method][1](subject.allocator, _lists(subject)[what])


def _of_array(what: str, subject: Owned) -> None:
    subject.allocator.check_live(_shapeless(subject)[what])


def _was_given(given: IndexArray | None, each: IdAllocator, count: int) -> bool:
    """So many ids were given; they go back."""
    if given is None or len(given) != count:
        return False
    each.free(given)
    return True


def _held_twice(subject: Owned) -> object:
    """Pinned twice, an id is not free to go after one unpin."""
    subject.allocator.pin(ids(subject.pinned))
    subject.allocator.unpin(ids(subject.pinned))
    subject.allocator.free(ids(subject.pinned))
    return None


def _use(subject: Owned, *, is_reached: bool) -> object:
    """Free an id that a queued operation uses."""
    use = subject.allocator.hold(ids(subject.held), lambda: is_reached)
    try:
        subject.allocator.free(ids(subject.held))
    finally:
        subject.allocator.drop(use)
    while (taken := subject.allocator.allocate(1, OWNER)) is not None:  # freed ids come last
        if int(taken[0]) == subject.held:
            return True
        subject.allocator.free(taken)
    return False


def _use_of_changed(subject: Owned) -> bool:
    """A use is of the ids that were named, whatever the caller does with its list afterwards."""
    named, before = ids(subject.held), subject.allocator.pins
    use = subject.allocator.hold(named, lambda: False)
    named[0] = subject.last
    subject.allocator.drop(use)
    return subject.allocator.pins == before


def _unpin_edges(subject: Owned) -> bool:
    """The first and the last id can be pinned and unpinned."""
    edges = ids(subject.held, subject.last)
    subject.allocator.pin(edges)
    subject.allocator.unpin(edges)
    return True


ALLOCATOR: tuple[Misuse[Owned], ...] = (
    *(
        Misuse(f"{method} of {what}", error, partial(_of_list, method, what))
        for method, (error, _) in METHODS.items()
        for what in ("a free id", "an id below the first", "the id -1", "an id above the last")
    ),
    *(
        Misuse(f"check_live of {what}", LengthMismatch, partial(_of_array, what))
        for what in ("ids as floats", "a mask", "ids of int32", "a single id", "ids in two rows")
    ),
    Misuse("allocate of -1 ids", LengthMismatch, lambda each: each.allocator.allocate(-1, OWNER)),
    Misuse("allocate of no id", None, lambda each: _was_given(each.allocator.allocate(0, OWNER), each.allocator, 0)),
    Misuse(
        "allocate of one id more than is free",
        None,
        lambda each: each.allocator.allocate(each.allocator.available + 1, OWNER),
    ),
    Misuse(
        "allocate of all that is free",
        None,
        lambda each: _was_given(each.allocator.allocate(each.allocator.available, OWNER), each.allocator, 1),
    ),
    Misuse("free of one id twice in a call", DoubleFree, lambda each: each.allocator.free(ids(each.held, each.held))),
    Misuse("free of a pinned id", FreeInFlight, lambda each: each.allocator.free(ids(each.held, each.pinned))),
    Misuse("check_freeable of a pinned id", FreeInFlight, lambda each: each.allocator.check_freeable(ids(each.pinned))),
    Misuse("free of an id that was pinned twice and unpinned once", FreeInFlight, _held_twice),
    Misuse("free of an id that a queued operation uses", FreeInFlight, lambda each: _use(each, is_reached=False)),
    Misuse("free of an id whose operation has run", None, lambda each: _use(each, is_reached=True)),
    Misuse("hold of ids in a list that changes afterwards", None, _use_of_changed),
    Misuse("free of no id", None, lambda each: each.allocator.free(ids())),
    Misuse("check_freeable of no id", None, lambda each: each.allocator.check_freeable(ids())),
    Misuse(
        "check_live of the first and the last id",
        None,
        lambda each: each.allocator.check_live(ids(each.held, each.last)),
    ),
    Misuse(
        "check_owned of another request's id",
        ForeignAccess,
        lambda each: each.allocator.check_owned(ids(each.held, each.foreign), OWNER),
    ),
    Misuse(
        "check_owned of an id that was given back",
        ForeignAccess,
        lambda each: each.allocator.check_owned(ids(each.free), OWNER),
    ),
    Misuse(
        "check_owner of another request's id",
        ForeignAccess,
        lambda each: each.allocator.check_owner(each.foreign, OWNER),
    ),
    Misuse(
        "check_owner of an id that was given back",
        ForeignAccess,
        lambda each: each.allocator.check_owner(each.free, OWNER),
    ),
    Misuse("check_owner of the id -1", ForeignAccess, lambda each: each.allocator.check_owner(-1, OWNER)),
    Misuse(
        "check_owner of an id above the last",
        ForeignAccess,
        lambda each: each.allocator.check_owner(each.beyond, OWNER),
    ),
    Misuse(
        "check_owner of the first and the last id",
        None,
        lambda each: each.allocator.check_owner(each.held, OWNER),
    ),
    Misuse(
        "owner_of ids that nobody has",
        None,
        lambda each: all(each.allocator.owner_of(unit) is None for unit in (-1, each.free, each.beyond)),
    ),
    Misuse(
        "owner_of the first and the last id",
        None,
        lambda each: each.allocator.owner_of(each.held) == each.allocator.owner_of(each.last) == OWNER,
    ),
    Misuse(
        "unpin of an id that is not pinned",
        LengthMismatch,
        lambda each: each.allocator.unpin(ids(each.pinned, each.held)),
    ),
    Misuse(
        "unpin of an id more often than it is pinned",
        LengthMismatch,
        lambda each: each.allocator.unpin(ids(each.pinned, each.pinned)),
    ),
    Misuse("unpin of the id -1", LengthMismatch, lambda each: each.allocator.unpin(ids(-1))),
    Misuse("unpin of an id above the last", LengthMismatch, lambda each: each.allocator.unpin(ids(each.beyond))),
    Misuse("unpin of the first and the last id", None, _unpin_edges),
    Misuse("unpin of no id", None, lambda each: each.allocator.unpin(ids())),
)


def allocator_attempts() -> list[Attempt]:
    """Of allocators whose ids begin at 1, as on a device, and at 0, as on the host and in metadata."""
    return [attempt for first in (1, 0) for attempt in on_each(ALLOCATOR, owned(first), Owned.kept)]


@dataclass(frozen=True, slots=True)
class Lived:
    """An allocator of the engine as it is now."""

    allocator: IdAllocator

    def _where(self, *, live: bool) -> int | None:
        """The highest id that is live, or that is not."""
        top = self.allocator.count
        return next((unit for unit in range(top, -1, -1) if (self.allocator.owner_of(unit) is not None) == live), None)

    def with_free(self) -> IndexArray | None:
        """A live id, if there is one, and one that is not."""
        held, free = self._where(live=True), self._where(live=False)
        return None if free is None else ids(*(unit for unit in (held, free) if unit is not None))

    def twice(self) -> IndexArray | None:
        """A live id, named twice."""
        held = self._where(live=True)
        return None if held is None else ids(held, held)

    def kept(self) -> object:
        """What no refused call may change."""
        return self.allocator.available, self.allocator.pins


def _if_any(wrong: IndexArray | None, call: Callable[[IndexArray], object]) -> object:
    return NOT_NOW if wrong is None else call(wrong)


LIVE: tuple[Misuse[Lived], ...] = (
    Misuse(
        "free of an id that is not allocated", DoubleFree, lambda each: _if_any(each.with_free(), each.allocator.free)
    ),
    Misuse("free of a live id twice in a call", DoubleFree, lambda each: _if_any(each.twice(), each.allocator.free)),
    Misuse(
        "pin of an id that is not allocated", DoubleFree, lambda each: _if_any(each.with_free(), each.allocator.pin)
    ),
    Misuse(
        "check_live of an id that is not allocated",
        ForeignAccess,
        lambda each: _if_any(each.with_free(), each.allocator.check_live),
    ),
    Misuse("free of the id -1", DoubleFree, lambda each: each.allocator.free(ids(-1))),
    Misuse("free of an id above the last", DoubleFree, lambda each: each.allocator.free(ids(each.allocator.count + 1))),
    Misuse(
        "check_owned for a request that does not exist",
        ForeignAccess,
        lambda each: _if_any(each.twice(), lambda held: each.allocator.check_owned(held, -1)),
    ),
    Misuse("allocate of -1 ids", LengthMismatch, lambda each: each.allocator.allocate(-1, OWNER)),
    Misuse(
        "allocate of one id more than is free",
        None,
        lambda each: each.allocator.allocate(each.allocator.available + 1, OWNER),
    ),
)


def live_attempts(allocator: IdAllocator) -> list[Attempt]:
    """Of an allocator of the engine."""
    return [row.on(Lived(allocator), Lived.kept) for row in LIVE]
