"""Events of one schedule. Oracles judge these values.

Invariants:
- An event holds copies, never live product objects, and is never changed. Frequent classes are not frozen, as that
  takes four times as long.
- Events carry no time, only their order in the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcheck.core.base.content import RowSites
from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.stress.workload.mismatch import Mismatch
from kvcheck.core.stress.workload.report_events import ReportEvent
from kvcheck.core.stress.workload.tier_events import TierEvent, UseEvent


@dataclass(slots=True, unsafe_hash=True)
class Submitted:
    """record: its signal, reached when the operation has run."""

    ordinal: int
    name: str
    lane: str
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]
    record: int | None = None
    request: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class Completed:
    ordinal: int


@dataclass(slots=True, unsafe_hash=True)
class Recorded:
    """The signal covers everything queued in the lane so far."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class LaneWaited:
    """Operations queued in the lane from now on run after the record is reached."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class ProcessJoined:
    """The process waited for the record, or polled it and found it reached."""

    record: int


@dataclass(frozen=True, slots=True)
class ProcessDrained:
    """The process joined every lane."""


@dataclass(frozen=True, slots=True)
class ProcessActs:
    """From now on the named process submits and waits. "" is the harness, whose acts need no order."""

    process: str


@dataclass(frozen=True, slots=True)
class Allocated:
    space: str
    ids: tuple[int, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Freed:
    space: str
    ids: tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)
class Forward:
    request: int
    start: int
    stop: int


@dataclass(slots=True, unsafe_hash=True)
class Verified:
    """Words of a buffer were compared. request: their owner, None if unknown."""

    buffer: str
    words: int
    request: int | None = None


@dataclass(frozen=True, slots=True)
class SitesKnown:
    """The rows of every buffer and the metadata fields that hold content words."""

    rows: tuple[RowSites, ...]


@dataclass(frozen=True, slots=True)
class Saw:
    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Leased:
    """A metadata slot was allocated. residue: (field, words) of each field that was not empty."""

    request: int
    space: str
    slot: int
    residue: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """buffers: names in the value. table: names in the pool."""

    request: int
    tokens: int
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    request: int
    tokens: int
    pages: tuple[int, ...]
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Aliased:
    request: int
    what: str
    buffer: str
    page: int | None


@dataclass(frozen=True, slots=True)
class Owned:
    what: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Whether index values survived a call that must not change them."""

    request: int
    what: str
    unchanged: bool


@dataclass(frozen=True, slots=True)
class Retracted:
    request: int


@dataclass(frozen=True, slots=True)
class Resumed:
    request: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The right output of a request. by: the decoder; for content words, a reference run."""

    request: int
    tokens: tuple[int, ...]
    by: str = "words"


@dataclass(frozen=True, slots=True)
class Finished:
    request: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    request: int


@dataclass(frozen=True, slots=True)
class Happened:
    """A row of SITUATIONS happened."""

    subject: str
    state: str
    happening: str


@dataclass(frozen=True, slots=True)
class Counted:
    space: str
    free: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Closed:
    held: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions of each rank of an end in one round, as numbers. They must be equal."""

    end: str
    decisions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """A decode rank's view of a room: 0 failed, 3 transferring, 4 success."""

    rank: str
    room: int
    request: int
    generation: int
    old: int
    new: int
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    rank: str
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class HandoversKnown:
    """Bytes that each decode rank receives for a prompt, by request: see handover.bytes_for."""

    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LimitsNamed:
    """The reason of a room that timed out contains one of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SealsFitted:
    """A rank found the seals of all sources right. size: bytes they cover together."""

    rank: str
    request: int
    size: int


@dataclass(frozen=True, slots=True)
class RoomMarked:
    """A rank filled the memory of a room with this word, which marks unwritten memory."""

    rank: str
    word: int


@dataclass(frozen=True, slots=True)
class Unsealed:
    """A rank gave a room up though all its sources had reported it. sources: those with a wrong seal. words: of them,
    as compared. rows: the first differing row of each buffer, layer and source, by source."""

    rank: str
    request: int
    sources: tuple[str, ...]
    words: int
    rows: tuple[tuple[str, Mismatch], ...]


@dataclass(frozen=True, slots=True)
class RoomDrained:
    """All writers of a failed room have stopped. words: as compared. rows: of each buffer and layer the first row that
    holds neither the sources' words nor the mark of unwritten memory."""

    rank: str
    request: int
    words: int
    rows: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retried:
    request: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The scenario injected a fault into a transfer. names: words that the failure's reason must contain."""

    request: int
    why: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overdue:
    """The clock of an end jumped ahead. requests: those it may give up for that; the reason contains one of the
    names."""

    end: str
    rounds: int
    requests: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """Counts of a space after close. free must be total."""

    space: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """Entries of an index table that are not empty when idle, as (unit, its mapped value)."""

    table: str
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding unit of a buffer when idle. words: of the first changed row. Others: as in Mismatch."""

    space: str
    buffer: str
    piece: str
    layer: int
    row: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broke:
    """The target raised an error. code: the finding for that kind of error."""

    code: str
    error: str
    message: str
    request: int | None = None


RoomEvent = (
    Decided
    | RoomChanged
    | GaveUp
    | HandoversKnown
    | LimitsNamed
    | SealsFitted
    | RoomMarked
    | Unsealed
    | RoomDrained
    | Failed
    | Retried
    | Faulted
    | Overdue
)
Event = (
    Submitted
    | Completed
    | Recorded
    | LaneWaited
    | ProcessJoined
    | ProcessDrained
    | ProcessActs
    | Allocated
    | Freed
    | Forward
    | Verified
    | SitesKnown
    | Saw
    | Leased
    | Saved
    | Restored
    | Aliased
    | Owned
    | Descriptor
    | Retracted
    | Resumed
    | Expected
    | Finished
    | Aborted
    | Happened
    | Counted
    | Closed
    | RoomEvent
    | ReportEvent
    | UseEvent
    | TierEvent
    | Returned
    | Mapped
    | Padding
    | Broke
)
Emit = Callable[[Event], None]
"""Receives the events of an observer."""
