"""Node: a run of pages in the prefix tree, with its pages and state on each tier.

Invariants:
- Index values are owned, read-only copies: they are replaced, never changed.
- `locks` and `host_locks` of a node are never below the sum of those below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.events import Event

PageMask: TypeAlias = npt.NDArray[np.bool_]
"""One bool a page of a run."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowPages:
    """Window pages of a run of n pages. held: bool [n]. ids: of the held pages, in the run's order."""

    held: PageMask
    ids: IndexArray

    def __post_init__(self) -> None:
        if int(self.held.sum()) != len(self.ids):
            raise LengthMismatch(
                f"window pages: expected {int(self.held.sum())} ids, one a held page; got {len(self.ids)}"
            )
        held = np.array(self.held, dtype=np.bool_)
        held.setflags(write=False)
        object.__setattr__(self, "held", held)
        object.__setattr__(self, "ids", owned(self.ids))

    @staticmethod
    def of(row: IndexArray) -> WindowPages:
        """From a request's row: [n] device ids, 0 (the padding page) for pages that are gone."""
        return WindowPages(row > 0, row[row > 0])

    @staticmethod
    def nothing(count: int) -> WindowPages:
        return WindowPages(np.zeros(count, dtype=np.bool_), np.zeros(0, dtype=np.int64))

    def row(self) -> IndexArray:
        """[n] device ids, 0 (the padding page) for pages that are not held."""
        row = np.zeros(len(self.held), dtype=np.int64)
        row[self.held] = self.ids
        return row

    def among(self, wanted: PageMask) -> IndexArray:
        return self.ids[wanted[self.held]]

    def part(self, start: int, stop: int) -> WindowPages:
        return WindowPages(self.held[start:stop], self.ids[self.held[:start].sum() : self.held[:stop].sum()])

    def plus(self, places: IndexArray, ids: IndexArray) -> WindowPages:
        """Add `ids` for pages `places`, which are not held yet."""
        held = self.held.copy()
        held[places] = True
        at = np.concatenate((np.flatnonzero(self.held), places))
        return WindowPages(held, np.concatenate((self.ids, ids))[np.argsort(at)])


# keys    [page][page][page]                 token bytes of each page
# full    ids of the pages                   or None
# window  ids of the window pages held       or None; sliding-window layers
# state   the slot at the run's last token   or None; recurrent layers
class TierIndices:
    """Index values of one node on one tier; None: not held."""

    __slots__ = ("full", "state", "window")

    def __init__(self) -> None:
        self.full: IndexArray | None = None
        self.window: WindowPages | None = None
        self.state: int | None = None

    @property
    def is_live(self) -> bool:
        return self.full is not None

    def ids(self, space: str) -> IndexArray:
        """Ids of the tier in a space, owned by the caller."""
        if space == "full" and self.full is not None:
            return self.full.copy()
        if space == "window" and self.window is not None:
            return self.window.ids.copy()
        held = [self.state] if space == "state" and self.state is not None else []
        return np.array(held, dtype=np.int64)

    def hashes(self, chain: tuple[bytes, ...], space: str) -> tuple[bytes, ...]:
        """The hashes that go with `ids`; a state has the last."""
        if space == "state":
            return chain[-1:]
        if space == "window" and self.window is not None:
            return tuple(each for each, held in zip(chain, self.window.held, strict=True) if held)
        return chain


class Node:
    """A run of whole pages after its parent's. chain: one hash a page, each covering all pages before it."""

    __slots__ = (
        "backing",
        "chain",
        "children",
        "device",
        "hits",
        "host",
        "host_locks",
        "keys",
        "last_used",
        "loading",
        "locks",
        "ordinal",
        "parent",
        "priority",
        "stored",
    )

    def __init__(self, keys: tuple[bytes, ...], chain: tuple[bytes, ...], parent: Node | None, ordinal: int) -> None:
        self.keys = keys
        self.chain = chain
        self.parent = parent
        self.ordinal = ordinal
        self.children: dict[bytes, Node] = {}
        self.device = TierIndices()
        self.host = TierIndices()
        self.locks = 0
        self.host_locks = 0
        self.hits = 0
        self.priority = 0
        self.last_used = 0
        self.loading: tuple[Transfer, ...] = ()  # a second load may bring a companion that the first had left
        self.backing: Transfer | None = None
        self.stored = False

    @property
    def is_backed(self) -> bool:
        return self.host.is_live and self.backing is None

    def tier(self, name: str) -> TierIndices:
        return self.device if name == "device" else self.host

    def path(self) -> Iterator[Node]:
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent


def owned(ids: IndexArray) -> IndexArray:
    """A read-only copy, which shares no memory with a queue. (mutant: node-keeps-queue-view)"""
    copy = np.array(ids, dtype=np.int64)
    copy.setflags(write=False)
    return copy


@dataclass(frozen=True, slots=True)
class SpaceCopy:
    """The copies of one space, [n] each; ids are frozen."""

    space: str
    host: IndexArray
    device: IndexArray
    chain: tuple[bytes, ...]  # hashes of the pages
    owners: IndexArray  # requests that the copies are made for and that own the target ids

    def __post_init__(self) -> None:
        if not len(self.host) == len(self.device) == len(self.chain) == len(self.owners):
            raise LengthMismatch(
                f"transfer of {self.space}: {len(self.host)} host ids, {len(self.device)} device ids, "
                f"{len(self.chain)} hashes and {len(self.owners)} requests"
            )


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    number: int  # from 1
    kind: str
    request: int
    nodes: list[Node]  # a split adds to them
    copies: tuple[SpaceCopy, ...]
    lock: Node
    done: tuple[Signal, ...] = ()  # one for each lane
    acknowledged: bool = False
    producer: int | None = None  # the ring entry of a load that has started


@dataclass(frozen=True, slots=True)
class TransferBegan(Event):
    """A backup or a load was made; its operations follow, now or later."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class TransferEnded(Event):
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Fetched(Event):
    """Pages came from the store into host pages. Their device ids have no meaning."""

    request: int
    copies: tuple[SpaceCopy, ...]


def make_copy(
    space: str, host: IndexArray, device: IndexArray, chain: Sequence[bytes], *, owners: IndexArray | int
) -> SpaceCopy:
    """Make a copy that owns its index values. owners: of each unit, or of all of them."""
    each = np.full(len(host), owners) if isinstance(owners, int) else owners
    return SpaceCopy(space, owned(host), owned(device), tuple(chain), owned(each))


def merge(copies: Sequence[SpaceCopy]) -> tuple[SpaceCopy, ...]:
    """Return one new copy a space, in the order in which the spaces first appear."""
    spaces = dict.fromkeys(copy.space for copy in copies)
    return tuple(
        make_copy(
            space,
            np.concatenate([copy.host for copy in copies if copy.space == space]),
            np.concatenate([copy.device for copy in copies if copy.space == space]),
            [each for copy in copies if copy.space == space for each in copy.chain],
            owners=np.concatenate([copy.owners for copy in copies if copy.space == space]),
        )
        for space in spaces
    )


def full_pages(copies: Sequence[SpaceCopy]) -> tuple[bytes, ...]:
    return tuple(each for copy in copies if copy.space == "full" for each in copy.chain)
