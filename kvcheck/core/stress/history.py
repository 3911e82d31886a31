"""History: what happened in one schedule, as events that oracles judge while it runs or from a stored list.

Invariants:
- Oracles see events only; an event holds copies, never live product objects.
- An event's place in the list is its time; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation
from kvcheck.core.cache.transfer.metadata import MetadataField
from kvcheck.core.stress.events import (
    Aliased,
    Allocated,
    Completed,
    Decided,
    Descriptor,
    Event,
    Evicted,
    Forward,
    Freed,
    LaneWaited,
    Leased,
    LookedUp,
    Mapped,
    Owned,
    Padding,
    ProcessActs,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Restored,
    RoomChanged,
    Saved,
    Saw,
    Submitted,
    TierChanged,
    Transferred,
    Verified,
)
from kvcheck.core.workload.mismatch import Mismatch

Handler = Callable[[Any], None]


class History:
    """Takes events and passes each to the handlers of its kind; keeps them too when asked to."""

    def __init__(self, *, keep: bool = False) -> None:
        self.events: list[Event] = []
        self.count = 0
        self._keep = keep
        self._handlers: dict[type, list[Handler]] = {}

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
        self.append(ProcessJoined(record))

    def host_drained(self) -> None:
        """The host joined everything."""
        self.append(ProcessDrained())

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

    # What a target's cache does

    def looked_up(
        self, *, request: int, chain: tuple[bytes, ...], pages: int, device_pages: int, device_only: bool
    ) -> None:
        """A request looked its prompt up."""
        self.append(LookedUp(request, chain, pages, device_pages, device_only))

    def tier_changed(self, *, tier: str, space: str, chain: tuple[bytes, ...], ids: IndexArray, added: bool) -> None:
        """A tier gained or lost pages."""
        self.append(TierChanged(tier, space, chain, tuple(ids.tolist()), added))

    def transferred(self, *, kind: str, request: int, pages: int, frozen: bool) -> None:
        """A transfer was acknowledged."""
        self.append(Transferred(kind, request, pages, frozen))

    def evicted(self, *, tier: str, space: str, during_load: bool) -> None:
        """A node lost something."""
        self.append(Evicted(tier, space, during_load))

    def padding(self, *, space: str, buffer: str, piece: str, layer: int, row: int, words: tuple[int, ...]) -> None:
        """The padding unit of a buffer was compared with what it was."""
        self.append(Padding(space, buffer, piece, layer, row, words))

    def acting(self, host: str) -> None:
        """Another process goes on."""
        self.append(ProcessActs(host))

    def decided(self, *, end: str, decisions: tuple[tuple[int, ...], ...]) -> None:
        """Each rank of an end has decided its round."""
        self.append(Decided(end, decisions))

    def room(self, *, rank: str, room: int, request: int, generation: int, old: int, new: int, reason: str) -> None:
        """A decode rank's view of a room changed."""
        self.append(RoomChanged(rank, room, request, generation, old, new, reason))

    def sealed(self, *, rank: str, request: int, size: int) -> None:
        """Bytes fit their seal."""
        self.append(Verified("sealed", size // 8))

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
