"""History: what happened in one schedule, as events that oracles judge while it runs or from a stored list.

Invariants:
- Oracles see events only; an event holds copies, never live product objects.
- An event's place in the list is its time; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvcheck.core.backend.backend import Footprint, Lane, Operation
from kvcheck.core.hicache.controller import Leg
from kvcheck.core.paging import IndexArray
from kvcheck.core.transfer.metadata import MetadataField
from kvcheck.core.workload.mismatch import Mismatch


@dataclass(frozen=True, slots=True)
class Submitted:
    """An operation was queued, with what it reads and writes. record: reached when it has run."""

    ordinal: int
    name: str
    lane: str
    reads: tuple[Footprint, ...]
    writes: tuple[Footprint, ...]
    record: int | None = None
    request: int | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """An operation has run."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A signal now means everything queued in the lane so far."""

    record: int
    lane: str


@dataclass(frozen=True, slots=True)
class LaneWaited:
    """What is queued in the lane from now on runs behind the record."""

    record: int
    lane: str


@dataclass(frozen=True, slots=True)
class HostJoined:
    """The host waited for the record, or asked and was told that it is reached."""

    record: int


@dataclass(frozen=True, slots=True)
class HostDrained:
    """The host joined every lane."""


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


@dataclass(frozen=True, slots=True)
class Forward:
    """Positions [start, stop) of a request were computed."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Words of a buffer were read and compared."""

    buffer: str
    words: int


@dataclass(frozen=True, slots=True)
class Saw:
    """A read found a row that differs."""

    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Leased:
    """A metadata slot was handed out. residue: (field, words) of fields that were not empty."""

    request: int
    space: str
    slot: int
    residue: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A request was offloaded. buffers: in the value. table: of the pool."""

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
    """The reference run's output of a request."""

    request: int
    tokens: tuple[int, ...]


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
class Counted:
    """Accounting of a space when idle: free + cached must be total."""

    space: str
    free: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Bytes still allocated after close, by name of memory."""

    held: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A request looked its prompt up. chain: one hash a whole page. pages: found. device_pages: of them, on the device.

    device_only: what the host holds could not be loaded, and was left out.
    """

    request: int
    chain: tuple[bytes, ...]
    pages: int
    device_pages: int
    device_only: bool


@dataclass(frozen=True, slots=True)
class TierChanged:
    """A tier now holds, or no longer holds, pages or states of these hashes under these ids."""

    tier: str
    space: str
    chain: tuple[bytes, ...]
    ids: tuple[int, ...]
    added: bool


@dataclass(frozen=True, slots=True)
class Transferred:
    """A backup or a load was acknowledged. frozen: its index values are those it was made with."""

    kind: str
    request: int
    pages: int
    frozen: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """A node lost what a tier held of it in a space. during_load: while a load was in flight."""

    tier: str
    space: str
    during_load: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """Accounting of a space after close: free must be total."""

    space: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """Entries of an index table that are not empty when idle: (unit, what it is still mapped to)."""

    table: str
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding unit of a buffer when idle. words: of the first row that is not as it was made; none if all are.

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
    """The target raised. code: the finding that the kind of error stands for."""

    code: str
    error: str
    message: str


Event = (
    Submitted
    | Completed
    | Recorded
    | LaneWaited
    | HostJoined
    | HostDrained
    | Allocated
    | Freed
    | Forward
    | Verified
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
    | Counted
    | Closed
    | LookedUp
    | TierChanged
    | Transferred
    | Evicted
    | Returned
    | Mapped
    | Padding
    | Broke
)
Handler = Callable[[Any], None]


class History:
    """Takes events and passes each to the handlers of its kind; keeps them too when asked to."""

    def __init__(self, *, keep: bool = False) -> None:
        self.events: list[Event] = []
        self.count = 0
        self._keep = keep
        self._handlers: dict[type, list[Handler]] = {}
        self._moving: dict[int, bytes] = {}

    @staticmethod
    def of(*events: Event) -> History:
        """A literal history."""
        history = History(keep=True)
        for event in events:
            history.append(event)
        return history

    def listen(self, handlers: Iterable[tuple[type, Handler]]) -> None:
        """Pass later events of these kinds on."""
        for kind, handler in handlers:
            self._handlers.setdefault(kind, []).append(handler)

    def append(self, event: Event) -> None:
        """One more event."""
        self.count += 1
        if self._keep:
            self.events.append(event)
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    # OperationObserver

    def submitted(
        self,
        ordinal: int,
        operation: Operation,
        lane: Lane,
        reads: Iterable[Footprint],
        writes: Iterable[Footprint],
        record: int,
    ) -> None:
        """An operation was queued."""
        self.append(
            Submitted(ordinal, operation.name, lane.name, tuple(reads), tuple(writes), record, operation.request)
        )

    def recorded(self, record: int, lane: Lane) -> None:
        """A signal was recorded."""
        self.append(Recorded(record, lane.name))

    def lane_waited(self, record: int, lane: Lane) -> None:
        """A lane waits."""
        self.append(LaneWaited(record, lane.name))

    def host_joined(self, record: int) -> None:
        """The host waited."""
        self.append(HostJoined(record))

    def host_drained(self) -> None:
        """The host joined everything."""
        self.append(HostDrained())

    def completed(self, ordinal: int) -> None:
        """An operation has run."""
        self.append(Completed(ordinal))

    # EventSink of a target

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        """Ids were handed out."""
        self.append(Allocated(space, tuple(ids.tolist()), owner))

    def freed(self, space: str, ids: IndexArray) -> None:
        """Ids are free."""
        self.append(Freed(space, tuple(ids.tolist())))

    def saved(self, *, request: int, tokens: int, buffers: tuple[str, ...], table: tuple[str, ...]) -> None:
        """A request was offloaded."""
        self.append(Saved(request, tokens, buffers, table))

    def restored(
        self, *, request: int, tokens: int, pages: IndexArray, buffers: tuple[str, ...], table: tuple[str, ...]
    ) -> None:
        """A request was restored."""
        self.append(Restored(request, tokens, tuple(pages.tolist()), buffers, table))

    def aliased(self, *, request: int, what: str, buffer: str, page: int | None) -> None:
        """A value shares storage."""
        self.append(Aliased(request, what, buffer, page))

    def owned(self, what: str) -> None:
        """A value shares nothing."""
        self.append(Owned(what))

    def descriptor(self, *, request: int, what: str, before: bytes, after: bytes) -> None:
        """Index values around a call."""
        self.append(Descriptor(request, what, before == after))

    def leased(
        self, *, request: int, space: str, slot: int, row: torch.Tensor, fields: tuple[MetadataField, ...]
    ) -> None:
        """A metadata slot was handed out; keep what was left in it."""
        residue = []
        if bool(row.any()):
            for field in fields:
                part = row[field.offset : field.offset + field.size_bytes]
                if bool(part.any()):
                    words = part[: len(part) // 8 * 8].contiguous().view(torch.int64)[:64]
                    residue.append((field.name, tuple(int(word) for word in words)))
        self.append(Leased(request, space, slot, tuple(residue)))

    # CacheListener of a target

    def looked_up(
        self, *, request: int, chain: tuple[bytes, ...], pages: int, device_pages: int, device_only: bool
    ) -> None:
        """A request looked its prompt up."""
        self.append(LookedUp(request, chain, pages, device_pages, device_only))

    def computed(self, *, request: int, chain: tuple[bytes, ...]) -> None:
        """Hashes of computed pages: an inspector's business."""

    def tier_changed(self, *, tier: str, space: str, chain: tuple[bytes, ...], ids: IndexArray, added: bool) -> None:
        """A tier gained or lost pages."""
        self.append(TierChanged(tier, space, chain, tuple(ids.tolist()), added))

    def moving(self, *, number: int, legs: tuple[Leg, ...]) -> None:
        """Remember the index values of a transfer."""
        self._moving[number] = _digest(legs)

    def transferred(self, *, number: int, kind: str, request: int, legs: tuple[Leg, ...]) -> None:
        """A transfer was acknowledged; compare its index values with those it was made with."""
        pages = sum(len(leg.host) for leg in legs if leg.space == "full")
        self.append(Transferred(kind, request, pages, self._moving.pop(number, None) == _digest(legs)))

    def evicted(self, *, tier: str, space: str, during_load: bool) -> None:
        """A node lost something."""
        self.append(Evicted(tier, space, during_load))

    def padding(self, *, space: str, buffer: str, piece: str, layer: int, row: int, words: tuple[int, ...]) -> None:
        """The padding unit of a buffer was compared with what it was."""
        self.append(Padding(space, buffer, piece, layer, row, words))

    def mapped(self, *, table: str, entries: tuple[tuple[int, int], ...]) -> None:
        """A table was searched for entries that are not empty."""
        self.append(Mapped(table, entries))

    # ReadSink of the decoder

    def forward(self, *, request: int, start: int, stop: int) -> None:
        """Positions were computed."""
        self.append(Forward(request, start, stop))

    def verified(self, buffer: str, words: int) -> None:
        """Words were compared."""
        self.append(Verified(buffer, words))

    def mismatch(self, found: Mismatch) -> None:
        """A row differed."""
        self.append(Saw(found))


def _digest(legs: tuple[Leg, ...]) -> bytes:
    """The index values of a transfer, as bytes to compare."""
    return b"|".join(leg.space.encode() + b":" + leg.host.tobytes() + b"," + leg.device.tobytes() for leg in legs)
