"""Receiver: a decode rank's side of every room: its Wants, the sources' reports, and its own check of the bytes.

Invariants:
- A room succeeds when this rank has read its bytes and checked their seal, not by a message.
- Pages and slots that a source may still write belong to the room until the source has sent Drained or is fenced.
- A message of an older generation changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import ForeignAccess
from kvcheck.core.base.paging import IndexArray, first_seen_page, pages_for
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Place
from kvcheck.core.cache.events import Emit, Event, RoomChanged, RoomMarked, SealsFitted
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.transfer.blocks import PageRun
from kvcheck.core.cache.transfer.layout import EndLayout, check_layouts, routes, sources_of
from kvcheck.core.cache.transfer.messages import Abort, AuxData, Done, Drained, Message, Status, Want
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow
from kvcheck.core.cache.transfer.seal import SEAL_BYTES, Content, Seal, Sealer, parse, piece_of
from kvcheck.core.cache.transfer.wire import Ticket, Wire
from kvcheck.kernels.content import as_signed, mix64_int
from kvcheck.kernels.page_copy import copy_bytes_torch, fill_torch

Units = Mapping[tuple[str, str], IndexArray]
"""Physical pages or slots by leg and space, in logical order."""
FAILED, TRANSFERRING, SUCCESS = 0, 3, 4
"""As in SGLang's KVPoll: the minimum over all ranks counts, so a failure wins."""
MARK = 0x6D61726B65642121
"""Mixed with the generation, it fills a room's memory before anything has landed."""


def register_memory(wire: Wire, pool: KVPool, metadata: MetadataBuffers, seals: torch.Tensor) -> None:
    wire.register("seals", seals.view(-1))
    wire.register("metadata", metadata.memory())
    for space, buffer in pool.buffers():
        words = pool.sets[space].write_view(buffer.name)
        wire.register(f"{space}.{buffer.name}", words.view(torch.uint8).view(-1))


def needed_pages(layout: EndLayout, space: str, tokens: int) -> range:
    """Logical pages that a prompt needs: of a window, those that its next position sees."""
    first = first_seen_page(tokens, layout.window, layout.page_size) if space == "window" else 0
    return range(first, pages_for(tokens, layout.page_size))


def held_run(layout: EndLayout, holding: Holding, space: str, tokens: int) -> PageRun:
    """Pages of a holding's first `tokens` tokens, without leading pages that are gone."""
    pages = holding.window_pages if space == "window" else holding.pages
    held = pages[: pages_for(tokens, layout.page_size)]
    gone = int(np.argmax(held > 0)) if len(held) else 0
    return PageRun(gone, held[gone:])


def room_units(layout: EndLayout, holding: Holding, tokens: int) -> Units:
    units: dict[tuple[str, str], IndexArray] = {}
    for leg, space in layout.parts:
        if space == "state":
            units[leg, space] = np.array([holding.state_slot], dtype=np.int64)
        else:
            needed = needed_pages(layout, space, tokens)
            pages = holding.window_pages if space == "window" else holding.pages
            units[leg, space] = pages[needed.start : needed.stop]
    return units


def room_footprints(layout: EndLayout, units: Units, request: int) -> tuple[Footprint, ...]:
    touched = []
    for (leg, space), ids in units.items():
        buffers = [each for each in layout.buffers if (each.leg, each.space) == (leg, space)]
        names = tuple(each.name for each in buffers)
        owners = np.full(len(ids), request, dtype=np.int64)
        touched.append(Footprint(space, names, (0, buffers[0].rows.layers), ids.copy(), owners=owners))
    return tuple(touched)


@dataclass(slots=True, kw_only=True)
class InboundRoom:
    ticket: Ticket
    holding: Holding
    tokens: int
    slot: int
    deadline: int
    waits: set[str]  # peers that have not reported
    writers: set[str]  # peers that may still write
    status: int = TRANSFERRING
    reason: str = ""  # of the failure here
    ended: str = ""  # reason of its end here, perhaps after it arrived
    sealed: set[str] = field(default_factory=set)  # peers whose seal for this attempt was seen
    verified: set[str] = field(default_factory=set)  # peers whose seal fits
    size: int = 0  # bytes that they wrote
    is_answered: bool = False  # a source has answered the Want, so the memory was marked before


@dataclass(frozen=True, slots=True)
class RoomUnsealed(Event):
    """A room timed out though all sources reported it. Its memory is unchanged."""

    room: InboundRoom


@dataclass(frozen=True, slots=True)
class RoomLeft(Event):
    """A failed room is no longer written; its memory is released now."""

    room: InboundRoom


# TRANSFERRING --all ranks reported, seal verified here--> SUCCESS --every rank agrees--> taken
#      |------------ reported not ok, aborted, too late --> FAILED  --drained by every source--> released
class Receiver:
    """One decode rank. clock: rounds, or seconds, since the start; patience: of a room."""

    def __init__(
        self,
        pool: KVPool,
        metadata: MetadataBuffers,
        wire: Wire,
        backend: Backend,
        *,
        layout: EndLayout,
        peers: Sequence[EndLayout],
        clock: Callable[[], int],
        patience: int,
        sealer: type[Sealer] = Sealer,
        emit: Emit | None = None,
    ) -> None:
        for peer in peers:
            check_layouts(layout, peer)
        self._pool = pool
        self._metadata = metadata
        self._wire = wire
        self._backend = backend
        self._layout = layout
        self._emit = emit
        self._clock = clock
        self._patience = patience
        self._sealer = sealer(pool, layout, backend)
        pairs = routes(layout, sources=len(peers), targets=layout.ranks)
        self.sources = {peer.name: peer for peer in peers if (peer.rank, layout.rank) in pairs}
        self._slices = {name: pairs[peer.rank, layout.rank] for name, peer in self.sources.items()}
        self._ranks = len(peers)
        self._row_sender = sources_of(pairs, layout.rank)[0]
        self._attempts = 0
        self._gone: set[str] = set()
        self._seals = backend.empty(
            "seals", (metadata.slots.count * self._ranks, SEAL_BYTES), torch.uint8, Place.DEVICE
        )
        self._seen = backend.empty("seals.seen", tuple(self._seals.shape), torch.uint8, Place.PINNED)
        self._lane = backend.lane("verify")
        self._rooms: dict[int, InboundRoom] = {}
        self._clear_seals(np.arange(len(self._seals)))
        register_memory(wire, pool, metadata, self._seals)

    # A room's life

    def expect(self, room: int, holding: Holding, tokens: int, slot: int, *, attempt: int = 0) -> InboundRoom:
        """Send a Want for this holding and slot to every source. `take` or `forget` releases the slot. Raise
        ForeignAccess while an earlier attempt holds memory."""
        if room in self._rooms:
            raise ForeignAccess(f"room {room}: an earlier attempt is not over, got attempt {attempt}")
        ticket = Ticket(room, self._next_generation(room), holding.request, attempt)
        names = set(self.sources)
        receiving = self._rooms[room] = InboundRoom(
            ticket=ticket,
            holding=holding,
            tokens=tokens,
            slot=slot,
            deadline=self._clock() + self._patience,
            waits=set(names),
            writers=names - self._gone,
        )
        if gone := names & self._gone:
            self._set(receiving, FAILED, _gone(gone))
            return receiving
        want = Want(
            room=room,
            attempt=attempt,
            generation=ticket.generation,
            request=holding.request,
            tokens=tokens,
            slot=slot,
            state_slot=holding.state_slot,
            runs=self._runs(holding, tokens),
        )
        self._mark(receiving)
        ready = self._backend.signal()
        self._backend.record(ready, lane=self._pool.forward)
        for peer in self.sources:
            self._wire.send(peer, want, after=(ready,))
        return receiving

    def is_open(self, room: int) -> bool:
        return room in self._rooms

    def take(self, receiving: InboundRoom) -> MetadataRow:
        """Close a room that every rank has verified. Return its metadata."""
        ticket = receiving.ticket
        row = self._metadata.get(receiving.slot, ticket.request)
        del self._rooms[ticket.room]
        for peer in self.sources:
            self._wire.send(peer, Done(room=ticket.room, generation=ticket.generation, is_ok=True))
        self._clear_seals(self._seal_rows(receiving))
        self._metadata.release(receiving.slot, ticket.request)
        return row

    def fail(self, receiving: InboundRoom, reason: str) -> None:
        """Fail and abort a room. Its memory is kept until its sources answer."""
        self._set(receiving, FAILED, reason)
        receiving.ended = reason
        self._ask_to_stop(receiving)

    def is_drained(self, receiving: InboundRoom) -> bool:
        """True once no source can write the room. (mutants: pages-freed-before-drain, slot-freed-before-drain)"""
        return not receiving.writers

    def forget(self, *rooms: InboundRoom) -> None:
        """Release the seals and then the slots of failed rooms."""
        for receiving in rooms:
            room = receiving.ticket.room
            if receiving.writers:
                writers = ", ".join(sorted(receiving.writers))
                raise ForeignAccess(f"room {room}: {writers} may still write its memory")
            del self._rooms[room]
            if self._emit is not None and receiving.is_answered:
                self._emit(RoomLeft(receiving))
            self._clear_seals(self._seal_rows(receiving))
        for receiving in rooms:
            self._metadata.release(receiving.slot, receiving.ticket.request)

    def fence(self, peer: str) -> None:
        """Handle the end of a peer and its engine: it writes nothing any more."""
        self._gone.add(peer)
        for receiving in self._rooms.values():
            receiving.writers.discard(peer)
            if peer in receiving.waits:
                self._set(receiving, FAILED, _gone({peer}))

    def free(self) -> None:
        self._backend.release("seals")
        self._backend.release("seals.seen")

    # Messages

    def poll(self) -> None:
        """Receive messages, check reported rooms, and fail late ones."""
        for peer, message in self._wire.receive():
            receiving = self._rooms.get(message.room)
            is_source = peer in self.sources and peer not in self._gone
            if is_source and receiving is not None and message.generation == receiving.ticket.generation:
                self._take(peer, message, receiving)
            elif is_source and isinstance(message, Status) and message.is_ok:  # the answer to the first one was lost
                self._wire.send(peer, Done(room=message.room, generation=message.generation, is_ok=True))
        for room, receiving in self._rooms.items():
            if receiving.ended and receiving.writers and self._clock() >= receiving.deadline:
                self._ask_again(receiving)
            if self._is_open(receiving) and not receiving.waits:
                self._look(receiving)
            if self._is_open(receiving) and self._clock() >= receiving.deadline:
                late = sorted(receiving.waits) or sorted(self.sources.keys() - receiving.verified)
                if not receiving.waits and self._emit is not None:
                    self._emit(RoomUnsealed(receiving))
                self.fail(
                    receiving,
                    f"room {room}: nothing complete from {', '.join(late)} in {self._patience} rounds or seconds",
                )

    def _ask_again(self, receiving: InboundRoom) -> None:
        """Repeat the Abort: it or its answer may be lost. (mutant: abort-said-once)"""
        self._ask_to_stop(receiving)

    def _ask_to_stop(self, receiving: InboundRoom) -> None:
        ticket, reason = receiving.ticket, receiving.ended
        receiving.deadline = self._clock() + self._patience
        for peer in sorted(receiving.writers):
            abort = Abort(room=ticket.room, attempt=ticket.attempt, generation=ticket.generation, reason=reason)
            self._wire.send(peer, abort)

    def _next_generation(self, room: int) -> int:
        """A generation new at this rank. (mutant: generation-kept)"""
        self._attempts += 1
        return self._attempts

    def _take(self, peer: str, message: Message, receiving: InboundRoom) -> None:
        if isinstance(message, Status):
            receiving.is_answered = True
            receiving.waits.discard(peer)
            if not message.is_ok:
                self._set(receiving, FAILED, message.reason)
        elif isinstance(message, Drained):
            receiving.writers.discard(peer)
            receiving.waits.discard(peer)
            self._set(receiving, FAILED, f"{peer} stopped writing")
        elif isinstance(message, AuxData):
            self._write_row(message, receiving)

    def _write_row(self, message: AuxData, receiving: InboundRoom) -> None:
        data = np.frombuffer(bytes.fromhex(message.row), dtype=np.uint8).copy()
        if message.slot != receiving.slot or len(data) != self._metadata.packed_bytes:
            self._set(
                receiving,
                FAILED,
                f"room {message.room}: aux data of {len(data)} bytes for slot {message.slot}; expected "
                f"{self._metadata.packed_bytes} bytes for slot {receiving.slot}",
            )
            return
        self._metadata.put(receiving.slot, receiving.ticket.request, torch.from_numpy(data))

    def _is_open(self, receiving: InboundRoom) -> bool:
        """True while transferring; only then can the status change. (mutant: failed-overwritten)"""
        return receiving.status == TRANSFERRING

    def _set(self, receiving: InboundRoom, status: int, reason: str = "") -> None:
        if not self._is_open(receiving):
            return
        old, receiving.status, receiving.reason = receiving.status, status, reason
        rank, ticket = self._layout.name, receiving.ticket
        if self._emit is not None:
            self._emit(RoomChanged(rank, ticket.room, ticket.request, ticket.generation, old, status, reason))

    # The seal

    def _look(self, receiving: InboundRoom) -> None:
        for peer in sorted(self.sources.keys() - receiving.verified):
            if not self._is_sealed(peer, receiving):
                return
            receiving.verified.add(peer)
            self._wire.verified(peer, receiving.ticket)
        if self._emit is not None:
            self._emit(SealsFitted(self._layout.name, receiving.ticket.request, receiving.size))
        self._set(receiving, SUCCESS)

    def _is_sealed(self, peer: str, receiving: InboundRoom) -> bool:
        """Check all bytes of the peer. This may race with its writes, since only a match counts."""
        rank, ticket = self.sources[peer].rank, receiving.ticket
        if peer not in receiving.sealed:
            # The digest costs most, so first see whether there is a seal of this very attempt at all.
            seal = self._found(peer, receiving)
            if seal is None or (seal.room, seal.generation) != (ticket.room, ticket.generation):
                return False
            receiving.sealed.add(peer)
        content = Content(
            ticket=ticket,
            source_rank=rank,
            units=self._units(receiving),
            pieces=piece_of(self._slices[peer], at_source=False),
            row=self._metadata.row_view(receiving.slot) if rank == self._row_sender else None,
        )
        plan, at = self._sealer.plan(content), self._seal_at(peer, receiving)
        found, differs = self._seals[at].view(torch.int64), self._seen[at].view(torch.int64)

        def run() -> None:
            copy_bytes_torch(differs, found ^ self._sealer.seal(plan))

        self._look_with(Operation("seal.verify", (run,), ticket.request), at, self._looked_at(receiving, content, at))
        is_right = not self._seen[at].any()
        receiving.size += plan.size if is_right else 0
        return is_right

    def _found(self, peer: str, receiving: InboundRoom) -> Seal | None:
        """The peer's seal, perhaps of an earlier attempt; None if none is complete."""
        at = self._seal_at(peer, receiving)
        chunk = partial(copy_bytes_torch, self._seen[at], self._seals[at])
        self._look_with(Operation("seal.look", (chunk,), receiving.ticket.request), at, (self._seal_read(at),))
        return parse(self._seen[at])

    def _look_with(self, operation: Operation, at: int, reads: tuple[Footprint, ...]) -> None:
        """Run a check that copies its result to host memory, and wait. A host wait inside the operation would wait for
        everything ahead of the lane."""
        seen = Footprint("seals.seen", ("seal",), (0, 1), np.array([at], dtype=np.int64), place=Place.PINNED)
        self._backend.wait(self._backend.submit(operation, lane=self._lane, reads=reads, writes=(seen,)))

    def _looked_at(self, receiving: InboundRoom, content: Content, at: int) -> tuple[Footprint, ...]:
        request = receiving.ticket.request
        reads = [*room_footprints(self._layout, content.units, request), self._seal_read(at)]
        if content.row is not None:
            reads.append(self._metadata.footprint(receiving.slot, request))
        return tuple(replace(each, is_checked=True) for each in reads)

    def _seal_read(self, at: int) -> Footprint:
        return Footprint("seals", ("seal",), (0, 1), np.array([at], dtype=np.int64), is_checked=True)

    def _seal_at(self, peer: str, receiving: InboundRoom) -> int:
        return receiving.slot * self._ranks + self.sources[peer].rank

    def _mark(self, receiving: InboundRoom) -> None:
        """Fill a room's memory with words that no sender writes, before any Want is sent."""
        # Otherwise memory that already holds the right bytes (the unused rest of a last page, a recycled page of the
        # same prompt) would fit the seal before it was written, and a late write would overwrite later content.
        word = mark_of(receiving.ticket.generation)
        if self._emit is not None:
            self._emit(RoomMarked(self._layout.name, word))
        request, units = receiving.ticket.request, self._units(receiving)
        targets: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffer in self._layout.buffers:
            view = self._pool.sets[buffer.space].write_view(buffer.name)
            of_units = view.view(buffer.rows.layers, -1, buffer.rows.rows_per_unit * view.shape[2])
            targets.append((of_units, self._backend.index(units[buffer.leg, buffer.space])))
        row = self._metadata.row_view(receiving.slot).view(torch.int64)

        def run() -> None:
            for view, rows in targets:
                view.index_fill_(1, rows, word)
            row.fill_(word)

        slot = self._metadata.footprint(receiving.slot, request)
        self._backend.submit(
            Operation("receive.mark", (run,), request),
            lane=self._pool.forward,
            writes=(*room_footprints(self._layout, units, request), slot),
        )

    def _units(self, receiving: InboundRoom) -> Units:
        return room_units(self._layout, receiving.holding, receiving.tokens)

    def _runs(self, holding: Holding, tokens: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        runs = []
        for leg, space in (each for each in self._layout.parts if each[1] != "state"):
            run = held_run(self._layout, holding, space, tokens)
            runs.append((f"{leg}.{space}", run.first, tuple(run.pages.tolist())))
        return tuple(runs)

    def _seal_rows(self, receiving: InboundRoom) -> IndexArray:
        first = receiving.slot * self._ranks
        return np.arange(first, first + self._ranks)

    def _clear_seals(self, rows: IndexArray) -> None:
        into = self._seals[int(rows[0]) : int(rows[-1]) + 1]
        self._backend.wait(
            self._backend.submit(
                Operation("seal.clear", (lambda: fill_torch(into, 0),)),
                lane=self._lane,
                writes=(Footprint("seals", ("seal",), (0, 1), rows),),
            )
        )


def mark_of(generation: int) -> int:
    return as_signed(mix64_int(generation ^ MARK))


def _gone(peers: set[str]) -> str:
    return f"{', '.join(sorted(peers))} is gone"
