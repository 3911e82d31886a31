"""Events of the cache's parts, for observers of a run. A page is named by the hash of the prefix that ends with it.

Invariants:
- An event holds copies, never live product objects, and is never changed. Those that a part makes for an inspection of
  its own memory are the exception, and stand beside what they hold.
- Events carry no time, only their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Event:
    __slots__ = ()


Emit = Callable[[Event], None]


# Allocation


@dataclass(frozen=True, slots=True)
class Allocated(Event):
    space: str
    ids: tuple[int, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Freed(Event):
    space: str
    ids: tuple[int, ...]


# Rooms of a transfer


@dataclass(frozen=True, slots=True)
class RoomChanged(Event):
    """A decode rank's view of a room: 0 failed, 3 transferring, 4 success."""

    rank: str
    room: int
    request: int
    generation: int
    old: int
    new: int
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    rank: str
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class SealsFitted(Event):
    """A rank found the seals of all sources right. size: bytes they cover together."""

    rank: str
    request: int
    size: int


@dataclass(frozen=True, slots=True)
class RoomMarked(Event):
    """A rank filled the memory of a room with this word, which marks unwritten memory."""

    rank: str
    word: int


# Tiers of a prefix cache


@dataclass(frozen=True, slots=True)
class LookedUp(Event):
    """chain: one hash for each whole page. pages, device_pages: pages found, and those of them on the device.
    device_only: pages of the host could not be loaded and were left out."""

    request: int
    chain: tuple[bytes, ...]
    pages: int
    device_pages: int
    device_only: bool
    priority: int = 0


@dataclass(frozen=True, slots=True)
class StoreQueried(Event):
    """The store was queried for a prompt, before its lookup. is_fetching: a prefetch of its pages was started."""

    request: int
    chain: tuple[bytes, ...]
    is_fetching: bool


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """A request offers the prefix cache pages that it has computed or found there."""

    request: int
    chain: tuple[bytes, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class Locked(Event):
    """The prefix that ends at this hash is locked on a tier once more, or once less."""

    tier: str
    end: bytes
    added: bool


@dataclass(frozen=True, slots=True)
class RoomWanted(Event):
    """A tier was requested to free so many pages or slots of a space. The victims that follow are for that."""

    tier: str
    space: str
    units: int


@dataclass(frozen=True, slots=True)
class Chosen(Event):
    """The run of pages to be evicted. passed: ends of runs chosen before that could not go."""

    tier: str
    space: str
    chain: tuple[bytes, ...]
    passed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Flushed(Event):
    """These pages leave these tiers on request, whatever the order of eviction."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """A backup, a prefetch or a snapshot was given up, as that space had no room in the host (snapshot: device)."""

    kind: str
    request: int
    space: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored(Event):
    """The store has taken these pages or states, or could not serve them whole. keys: of the objects."""

    space: str
    chain: tuple[bytes, ...]
    is_whole: bool
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierChanged(Event):
    tier: str
    space: str
    chain: tuple[bytes, ...]
    ids: tuple[int, ...]
    added: bool


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """A tier lost its part of a node. during_load: some load was in flight."""

    tier: str
    space: str
    during_load: bool
