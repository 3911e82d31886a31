"""Events: what can happen in one schedule. Oracles judge these values.

Invariants:
- An event holds copies, never live product objects.
- Events carry no time. Their order in the history is all that an oracle knows of it.
- Nobody changes an event. Those of which a schedule makes thousands are not frozen, which takes four times as long.
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
    """An operation was queued, with what it reads and writes. record: its signal, reached when it has run."""

    ordinal: int
    name: str
    lane: str
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]
    record: int | None = None
    request: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class Completed:
    """An operation has run."""

    ordinal: int


@dataclass(slots=True, unsafe_hash=True)
class Recorded:
    """A signal now means everything queued in the lane so far."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class LaneWaited:
    """What is queued in the lane from now on runs after the record is reached."""

    record: int
    lane: str


@dataclass(slots=True, unsafe_hash=True)
class ProcessJoined:
    """The process waited for the record, or asked for it and found it reached."""

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
    """Ids were handed to a request."""

    space: str
    ids: tuple[int, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Ids are free."""

    space: str
    ids: tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)
class Forward:
    """Positions [start, stop) of a request were computed."""

    request: int
    start: int
    stop: int


@dataclass(slots=True, unsafe_hash=True)
class Verified:
    """Words of a buffer were read and compared. request: the request that they belong to, None if it is not known."""

    buffer: str
    words: int
    request: int | None = None


@dataclass(frozen=True, slots=True)
class SitesKnown:
    """The places that the run's content words are written for: the rows of every buffer, and the metadata fields."""

    rows: tuple[RowSites, ...]


@dataclass(frozen=True, slots=True)
class Saw:
    """A read found a row that differs."""

    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Leased:
    """A metadata slot was handed out. residue: (field, words) of each field that was not empty."""

    request: int
    space: str
    slot: int
    residue: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A request was offloaded. buffers: names of those in the value. table: names of those in the pool."""

    request: int
    tokens: int
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """A request was restored into pages of the full space."""

    request: int
    tokens: int
    pages: tuple[int, ...]
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Aliased:
    """A value that must be owned shares storage with a buffer."""

    request: int
    what: str
    buffer: str
    page: int | None


@dataclass(frozen=True, slots=True)
class Owned:
    """A value that must be owned shares nothing."""

    what: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Index values around a call that must not change them."""

    request: int
    what: str
    unchanged: bool


@dataclass(frozen=True, slots=True)
class Retracted:
    """The scheduler reported a retraction."""

    request: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The scheduler reported a resume."""

    request: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The right output of a request. by: the decoder that it is of; that of words is a reference run's."""

    request: int
    tokens: tuple[int, ...]
    by: str = "words"


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's output."""

    request: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request was ended before it finished."""

    request: int


@dataclass(frozen=True, slots=True)
class Happened:
    """Something happened to a subject in a state: a row of SITUATIONS."""

    subject: str
    state: str
    happening: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a space when idle. free + cached must be total."""

    space: str
    free: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Bytes that are still allocated after close, by name of the memory."""

    held: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """What each rank of an end decided in one round, as numbers. They must be equal."""

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
    """A prefill rank has ended an attempt of a request, for a reason of its own or of its peers."""

    rank: str
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class HandoversKnown:
    """Bytes that each decode rank has to receive for a prompt, by request: its part of every buffer, and one row."""

    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LimitsNamed:
    """The reason of a room that ran out of time contains one of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SealsFitted:
    """A rank found the seals of all sources right. size: bytes that they cover together."""

    rank: str
    request: int
    size: int


@dataclass(frozen=True, slots=True)
class RoomMarked:
    """A rank filled the memory of a room with this word. It means that nobody has written there yet."""

    rank: str
    word: int


@dataclass(frozen=True, slots=True)
class Unsealed:
    """A rank gave a room up though all its sources had reported it. sources: those whose seal does not fit.

    words: how many of their words were compared. rows: the first row that differs of each buffer, layer and source, by
    the name of the source.
    """

    rank: str
    request: int
    sources: tuple[str, ...]
    words: int
    rows: tuple[tuple[str, Mismatch], ...]


@dataclass(frozen=True, slots=True)
class RoomDrained:
    """A rank was told that nobody writes a failed room any more. words: how many of its words were compared.

    rows: of each buffer and layer the first row that is neither what the request's sources write nor what marks memory
    that nobody has written.
    """

    rank: str
    request: int
    words: int
    rows: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request's transfer ended in a failure that both ends know of."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retried:
    """A request that failed was sent once more, this time without a fault."""

    request: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The scenario put a fault into a request's transfer. names: words that the reason of its failure must contain."""

    request: int
    why: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overdue:
    """The clock of an end went on by so many rounds at once. requests: those that it may give up by that.

    names: the reason of such a failure contains one of them.
    """

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
    """Entries of an index table that are not empty when idle, as (unit, what it is still mapped to)."""

    table: str
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding unit of a buffer when idle. words: those of the first row that has changed, empty if none has.

    layer: global layer id. piece, row: as in a Mismatch.
    """

    space: str
    buffer: str
    piece: str
    layer: int
    row: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broke:
    """The target raised an error. code: the finding for that kind of error. request: whose call raised it."""

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
"""Where whoever observes a part puts the events that he has made."""
