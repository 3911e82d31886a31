"""Events of one schedule, beside those of the cache's parts and of its backend. Oracles judge these values.

Invariants:
- An event holds copies, never live product objects, and is never changed. Frequent classes are not frozen, as that
  takes four times as long.
- Events carry no time, only their order in the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.base.content import RowSites
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.workload.mismatch import Mismatch


@dataclass(frozen=True, slots=True)
class ProcessActs(Event):
    """From now on the named process submits and waits. "" is the harness, whose acts need no order."""

    process: str


@dataclass(slots=True, unsafe_hash=True)
class Forward(Event):
    request: int
    start: int
    stop: int


@dataclass(slots=True, unsafe_hash=True)
class Verified(Event):
    """Words of a buffer were compared. request: their owner, None if unknown."""

    buffer: str
    words: int
    request: int | None = None


@dataclass(frozen=True, slots=True)
class SitesKnown(Event):
    """The rows of every buffer and the metadata fields that hold content words."""

    rows: tuple[RowSites, ...]


@dataclass(frozen=True, slots=True)
class Saw(Event):
    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Leased(Event):
    """A metadata slot was allocated. residue: (field, words) of each field that was not empty."""

    request: int
    space: str
    slot: int
    residue: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """buffers: names in the value. table: names in the pool."""

    request: int
    tokens: int
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restored(Event):
    request: int
    tokens: int
    pages: tuple[int, ...]
    buffers: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Aliased(Event):
    request: int
    what: str
    buffer: str
    page: int | None


@dataclass(frozen=True, slots=True)
class Owned(Event):
    what: str


@dataclass(frozen=True, slots=True)
class Descriptor(Event):
    """Whether index values survived a call that must not change them."""

    request: int
    what: str
    unchanged: bool


@dataclass(frozen=True, slots=True)
class Retracted(Event):
    request: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    request: int


@dataclass(frozen=True, slots=True)
class Expected(Event):
    """The right output of a request. by: the decoder; for content words, a reference run."""

    request: int
    tokens: tuple[int, ...]
    by: str = "words"


@dataclass(frozen=True, slots=True)
class Finished(Event):
    request: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    request: int


@dataclass(frozen=True, slots=True)
class Happened(Event):
    subject: str
    state: str
    happening: str


@dataclass(frozen=True, slots=True)
class Counted(Event):
    space: str
    free: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Closed(Event):
    held: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Decided(Event):
    """The decisions of each rank of an end in one round, as numbers. They must be equal."""

    end: str
    decisions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HandoversKnown(Event):
    """Bytes that each decode rank receives for a prompt, by request: see handover.bytes_for."""

    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LimitsNamed(Event):
    """The reason of a room that timed out contains one of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unsealed(Event):
    """A rank gave a room up though all its sources had reported it. sources: those with a wrong seal. words: of them,
    as compared. rows: the first differing row of each buffer, layer and source, by source."""

    rank: str
    request: int
    sources: tuple[str, ...]
    words: int
    rows: tuple[tuple[str, Mismatch], ...]


@dataclass(frozen=True, slots=True)
class RoomDrained(Event):
    """All writers of a failed room have stopped. words: as compared. rows: of each buffer and layer the first row that
    holds neither the sources' words nor the mark of unwritten memory."""

    rank: str
    request: int
    words: int
    rows: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class Failed(Event):
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retried(Event):
    request: int


@dataclass(frozen=True, slots=True)
class Faulted(Event):
    """The scenario injected a fault into a transfer. names: words that the failure's reason must contain."""

    request: int
    why: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overdue(Event):
    """The clock of an end jumped ahead. requests: those it may give up for that; the reason contains one of the
    names."""

    end: str
    rounds: int
    requests: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """Counts of a space after close. free must be total."""

    space: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Mapped(Event):
    """Entries of an index table that are not empty when idle, as (unit, its mapped value)."""

    table: str
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Padding(Event):
    """The padding unit of a buffer when idle. words: of the first changed row. Others: as in Mismatch."""

    space: str
    buffer: str
    piece: str
    layer: int
    row: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broke(Event):
    """The target raised an error. code: the finding for that kind of error."""

    code: str
    error: str
    message: str
    request: int | None = None


# Reports of schedulers and engines, complete and in the order of their end


@dataclass(frozen=True, slots=True)
class Sent(Event):
    """A request was handed to every end of the engine. attempt: how often it was sent before."""

    request: int
    attempt: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """One end's report of a round, by request. end: "prefill", "decode", or "" for an engine that does both."""

    end: str
    admitted: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    retracted: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvictionsCounted(Event):
    tier: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEmitted(Event):
    """A rank sends a message about a request. kind: its class. copies: how often it will arrive; 0: it is lost."""

    sender: str
    peer: str
    kind: str
    request: int
    generation: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized(Event):
    """Sizes of an engine process. max_prefilling: admitted requests that have not joined. units: by space."""

    process: str
    page_size: int
    max_prefilling: int
    units: tuple[tuple[str, int], ...]


# Tiers of a prefix cache


@dataclass(frozen=True, slots=True)
class Modelled(Event):
    """window: tokens visible to a window layer, 0 if there is none."""

    page_size: int
    window: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class Declared(Event):
    """The rules of a prefix cache. uses: after how many uses a page is backed up, its computation being the first;
    None: when it leaves the device. orders: (tier, eviction order). units: (name of an allocator, its number of ids).
    ack_rounds: rounds between checks of its copies; None: not declared. load_lanes: of each engine, in turn."""

    uses: int | None
    orders: tuple[tuple[str, str], ...]
    units: tuple[tuple[str, int], ...]
    ack_rounds: int | None = None
    load_lanes: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """The answer to a request to remove these pages from these tiers. With both tiers the pages are a prefix and all
    its continuations."""

    tiers: tuple[str, ...]
    chain: tuple[bytes, ...]
    is_gone: bool


@dataclass(frozen=True, slots=True)
class StoreKeeps(Event):
    """The store of this run loses nothing: each object stays whole until it is deleted or damaged."""


@dataclass(frozen=True, slots=True)
class Damaged(Event):
    """The scenario damaged or lost the object under this key. An earlier read may still be pending."""

    key: str


@dataclass(frozen=True, slots=True)
class Deleted(Event):
    """Another process deleted these from the store. A write without acknowledgement may have come before or after, so
    whether the store has them is unknown from now on."""

    space: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Moving(Event):
    """A backup or a load was made; its operations follow, now or later. units: host ids, by space."""

    number: int
    kind: str
    units: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Transferred(Event):
    """A backup, a load or a prefetch was acknowledged. frozen: its index values are unchanged."""

    kind: str
    request: int
    pages: int
    frozen: bool
    chain: tuple[bytes, ...] = ()
    number: int = 0
