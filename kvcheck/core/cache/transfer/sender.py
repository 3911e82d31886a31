"""Sender: a prefill rank's side of every room: it writes, seals and reports a room, and frees its memory.

Invariants:
- Both ends use the router's attempt number, so that an answer to one attempt is never taken for another's.
- An exception in a room's transfer ends that room on both sides, and no other room.
- Pages and slots belong to the room until every decode rank has sent Done, or, after a failure, all writes are flushed.
- A Want counts once. A copy that arrives later, of any attempt, causes no write.
- From its first Want an attempt has `patience`, so a silent rank cannot hold it for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvcheck.core.base.errors import ForeignAccess, LengthMismatch, TargetError
from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.events import Emit, GaveUp
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.transfer.blocks import PageRun, pair_pages
from kvcheck.core.cache.transfer.layout import EndLayout, check_layouts
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status, Want
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import held_run, needed_pages
from kvcheck.core.cache.transfer.seal import Sealer
from kvcheck.core.cache.transfer.wire import Wire
from kvcheck.core.cache.transfer.writer import Writer

PENDING, DONE, FAILED = 0, 1, 2
REFUSED, UNWANTED, WANTED = 0, 1, 2
"""In both rows the minimum over all ranks counts."""

REPEATS = 3
"""Reports of a room within its patience, so that a lost message costs no memory."""


@dataclass(slots=True, kw_only=True)
class OutboundRoom:
    room: int
    attempt: int
    request: int
    tokens: int
    holding: Holding | None = None  # None until the prefill begins
    slot: int | None = None
    page: int = 0  # first page not yet sent
    deadline: int | None = None  # set by the first Want
    repeat_at: int = 0
    is_reported: bool = False
    reason: str = ""
    done: set[str] = field(default_factory=set)
    flushed: dict[str, Signal] = field(default_factory=dict)  # by peer, after a failure: its writes have ended
    reads: list[Signal] = field(default_factory=list)  # other reads of its memory


# wanted -> KV chunk by chunk -> state -> metadata row -> seal -> Status -> Done
class Sender:
    """One prefill rank. clock: rounds, or seconds, since the start; patience: of a room."""

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
        writer: type[Writer] = Writer,
        aux_over_messages: bool = False,
        emit: Emit | None = None,
    ) -> None:
        self._emit = emit
        for peer in peers:
            check_layouts(layout, peer)
        self._clock = clock
        self._patience = patience
        self._repeat_after = max(1, patience // REPEATS)
        self._pool = pool
        self._metadata = metadata
        self._wire = wire
        self._backend = backend
        self._layout = layout
        self._writer = writer(
            pool,
            metadata,
            wire,
            backend,
            layout=layout,
            peers=peers,
            sealer=sealer,
            aux_over_messages=aux_over_messages,
        )
        self._peers = self._writer.peers
        self._rooms: dict[int, OutboundRoom] = {}
        self._wants = Wants()

    # A room's life

    def open(self, room: int, request: int, tokens: int, *, attempt: int = 0) -> None:
        """Open the room of a prompt. Raise ForeignAccess while an earlier attempt holds memory."""
        if room in self._rooms:
            raise ForeignAccess(f"room {room}: attempt {self._rooms[room].attempt} is not over, got attempt {attempt}")
        self._rooms[room] = OutboundRoom(room=room, attempt=attempt, request=request, tokens=tokens)
        if reason := self._wants.ended(room, attempt):
            self.fail(room, reason)
        elif self._wants.of(room, attempt):
            self._rooms[room].deadline = self._clock() + self._patience

    def is_open(self, room: int) -> bool:
        return room in self._rooms

    def readiness(self, room: int) -> int:
        if self._rooms[room].reason:
            return REFUSED
        return WANTED if len(self._wants_of(self._rooms[room])) == len(self._peers) else UNWANTED

    def begin(self, room: int, holding: Holding) -> None:
        self._rooms[room].holding = holding

    def send_pages(self, room: int, tokens: int, after: Signal) -> None:
        """Send the whole pages, at the end also the last, of the first `tokens` tokens, once `after` is reached."""
        sending = self._rooms[room]
        assert sending.holding is not None
        size = self._pool.page_size
        stop = pages_for(tokens, size) if tokens >= sending.tokens else tokens // size
        first, sending.page = sending.page, max(sending.page, stop)
        if stop > first:
            self._each_peer(sending, partial(self._send_kv, sending, range(first, stop), after))

    def finish(self, room: int, slot: int, after: Sequence[Signal]) -> None:
        """Send the rest, seal and report, once `after` is reached."""
        sending = self._rooms[room]
        sending.slot = slot
        self._each_peer(sending, partial(self._send_rest, sending, after))
        if not sending.reason:
            sending.is_reported = True
            sending.repeat_at = self._clock() + self._repeat_after

    def fail(self, room: int, reason: str) -> None:
        sending = self._rooms[room]
        if sending.reason or sending.is_reported:
            return
        sending.reason = reason or "no reason given"
        if self._emit is not None:
            self._emit(GaveUp(self._layout.name, sending.request, sending.reason))
        for peer, want in self._wants_of(sending).items():  # to the others nothing was written
            sending.flushed[peer] = self._refuse(peer, want, reason)

    def refuse(self, room: int, attempt: int, reason: str) -> None:
        """End an attempt that was never opened, and refuse its Wants, also later ones."""
        for peer, want in self._wants.end(room, attempt, reason).items():
            self._refuse(peer, want, reason)

    def state(self, room: int) -> int:
        """PENDING while the room's memory is read or written; then DONE or FAILED."""
        sending = self._rooms[room]
        if not sending.reason and len(sending.done) == len(self._peers):
            return DONE
        if sending.reason and all(self._backend.query(each) for each in (*sending.flushed.values(), *sending.reads)):
            return FAILED
        return PENDING

    def reason(self, room: int) -> str:
        return self._rooms[room].reason

    def deadline(self, room: int) -> int | None:
        sending = self._rooms.get(room)
        return None if sending is None or sending.reason else sending.deadline

    def close(self, room: int) -> None:
        """Forget a room whose memory is released, but keep its end for late Wants."""
        sending = self._rooms.pop(room)
        self._wants.end(room, sending.attempt, sending.reason or "it was served before")

    def free(self) -> None:
        self._writer.free()

    # Messages

    def poll(self) -> None:
        for peer, message in self._wire.receive():
            if peer in self._peers:
                self._take(peer, message)
        for sending in self._rooms.values():
            if sending.deadline is not None and self._clock() >= sending.deadline:
                sending.deadline = None
                self._give_up(sending)
            elif sending.is_reported and not sending.reason and self._clock() >= sending.repeat_at:
                self._report(sending, sorted(self._peers.keys() - sending.done))

    def _report(self, sending: OutboundRoom, peers: Sequence[str]) -> None:
        sending.repeat_at = self._clock() + self._repeat_after
        for peer in peers:
            want = self._wants_of(sending)[peer]
            self._wire.send(peer, Status(room=want.room, generation=want.generation, is_ok=True))

    def _give_up(self, sending: OutboundRoom) -> None:
        silent = ", ".join(sorted(self._peers.keys() - sending.done))
        if silent and not sending.reason:
            sending.is_reported = False
            self.fail(
                sending.room,
                f"room {sending.room}: not asked for and taken by {silent} in {self._patience} rounds or seconds",
            )

    def _take(self, peer: str, message: Message) -> None:
        if isinstance(message, Want):
            if not self._wants.is_copy(peer, message):
                self._hear(peer, message)
            return
        want = self._wants.find(peer, message)
        sending = self._rooms.get(message.room)
        if isinstance(message, Abort):
            self._abort(peer, message, want, sending)
        elif want is None or sending is None or sending.attempt != want.attempt:
            return
        elif isinstance(message, Done):
            sending.done.add(peer)
            sending.reason = sending.reason or ("" if message.is_ok else message.reason)

    def _hear(self, peer: str, want: Want) -> None:
        sending = self._rooms.get(want.room)
        if sending is not None and want.attempt < sending.attempt:
            self._refuse(peer, want, f"room {want.room}: attempt {want.attempt} is over here")
        elif sending is not None and want.attempt == sending.attempt:
            self._wants_of(sending)[peer] = want
            if sending.deadline is None:
                sending.deadline = self._clock() + self._patience
            if sending.reason:
                self._refuse(peer, want, sending.reason)
        elif reason := self._wants.ended(want.room, want.attempt):
            self._refuse(peer, want, reason)
        else:
            self._wants.of(want.room, want.attempt)[peer] = want

    def _wants_of(self, sending: OutboundRoom) -> dict[str, Want]:
        return self._wants.of(sending.room, sending.attempt)

    def _abort(self, peer: str, message: Abort, want: Want | None, sending: OutboundRoom | None) -> None:
        """End the attempt, known or not, and send Drained behind all writes."""
        flushed = self._wire.flush(peer)
        self._wire.send(peer, Drained(room=message.room, generation=message.generation), after=(flushed,))
        if sending is not None and sending.attempt == message.attempt:
            if want is not None:
                sending.flushed[peer] = flushed
            if not sending.reason:
                sending.is_reported = False
                self.fail(message.room, message.reason)
        elif sending is not None and message.attempt < sending.attempt:
            return
        elif not self._wants.ended(message.room, message.attempt):
            self.refuse(message.room, message.attempt, message.reason)

    def _refuse(self, peer: str, want: Want, reason: str) -> Signal:
        flushed = self._wire.flush(peer)
        status = Status(room=want.room, generation=want.generation, is_ok=False, reason=reason)
        self._wire.send(peer, status, after=(flushed,))
        self._wire.send(peer, Drained(room=want.room, generation=want.generation), after=(flushed,))
        return flushed

    # Writes

    def _each_peer(self, sending: OutboundRoom, write: partial[None]) -> None:
        for peer in self._peers:
            if sending.reason:
                return
            try:
                self._check_want(sending, self._wants_of(sending)[peer])
                write(peer)
            except TargetError as error:
                self.fail(sending.room, str(error))

    def _check_want(self, sending: OutboundRoom, want: Want) -> None:
        """Check, before anything is sent, that the peer has this prompt's tokens and pages. Prompts of different
        lengths can have the same number of pages."""
        if want.tokens != sending.tokens:
            raise LengthMismatch(
                f"room {sending.room}: the ends disagree about the prompt: source has {sending.tokens} tokens, target "
                f"has {want.tokens} tokens; nothing of it is sent"
            )
        pages = range(pages_for(sending.tokens, self._pool.page_size))
        whole = PageRun(0, np.array(pages))  # only its length counts; the pages are taken chunk by chunk
        self._pair(whole, self._run(want, "kv", "full"), needed=pages, what=f"room {sending.room}, KV pages")

    def _send_kv(self, sending: OutboundRoom, pages: range, after: Signal, peer: str) -> None:
        want = self._wants_of(sending)[peer]
        assert sending.holding is not None
        source = PageRun(0, sending.holding.pages[: pages.stop])
        target = PageRun(0, self._run(want, "kv", "full").pages[: pages.stop])
        pairs = self._pair(source, target, needed=pages, what=f"room {sending.room}, KV pages")
        self._writer.write(want, peer, "kv", {"full": pairs}, after=(after,))

    def _send_rest(self, sending: OutboundRoom, after: Sequence[Signal], peer: str) -> None:
        want = self._wants_of(sending)[peer]
        pairs = self._state_pairs(sending, want)
        if pairs:
            self._send_state(sending, want, peer, pairs, after)
        assert sending.slot is not None and sending.holding is not None
        self._writer.write_row(want, peer, sending.slot, after)
        sealed = self._writer.seal(want, peer, holding=sending.holding, slot=sending.slot, after=after)
        sending.reads.append(sealed)  # before anything can fail: the pages are read until then
        sent = self._writer.write_seal(want, peer, sending.slot, sealed)
        self._wire.send(peer, Status(room=want.room, generation=want.generation, is_ok=True), after=(sent,))

    def _send_state(
        self, sending: OutboundRoom, want: Want, peer: str, pairs: Mapping[str, IndexArray], after: Sequence[Signal]
    ) -> None:
        """Send the state. A failure must end the room. (mutant: state-result-ignored)"""
        self._writer.write(want, peer, "state", pairs, after=after)

    def _state_pairs(self, sending: OutboundRoom, want: Want) -> dict[str, IndexArray]:
        holding, layout, tokens = sending.holding, self._layout, sending.tokens
        assert holding is not None
        pairs: dict[str, IndexArray] = {}
        for space in (space for leg, space in layout.parts if leg == "state"):
            if space == "state":
                pairs[space] = np.array([[holding.state_slot, want.state_slot]], dtype=np.int64)
                continue
            pairs[space] = self._pair(
                held_run(layout, holding, space, tokens),
                self._run(want, "state", space),
                needed=needed_pages(layout, space, tokens),
                what=f"room {sending.room}, state of {space}",
            )
        return pairs

    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        """Pair pages by logical page. (mutants: align-trims-one-side, align-trims-tail, align-broadcasts)"""
        return pair_pages(source, target, needed=needed, what=what)

    def _run(self, want: Want, leg: str, space: str) -> PageRun:
        name = f"{leg}.{space}"
        for known, first, pages in want.runs:
            if known == name:
                return PageRun(first, np.array(pages, dtype=np.int64))
        return PageRun(0, np.zeros(0, dtype=np.int64))


ENDED_MAX = 4096
"""Rooms whose end is kept for late Wants; a still later one runs into its deadline."""


class Wants:
    def __init__(self) -> None:
        self._rooms: dict[int, dict[int, dict[str, Want]]] = {}  # room -> attempt -> peer
        self._heard: dict[str, int] = {}  # peer -> generation of its last Want
        self._ended: dict[int, tuple[int, str]] = {}  # room -> its last attempt that ended, and why

    def is_copy(self, peer: str, want: Want) -> bool:
        """True if this Want, or a later one of the peer, was received before; else remember it."""
        if want.generation <= self._heard.get(peer, -1):
            return True
        self._heard[peer] = want.generation
        return False

    def of(self, room: int, attempt: int) -> dict[str, Want]:
        """The Wants of one attempt by peer: a live dictionary."""
        return self._rooms.setdefault(room, {}).setdefault(attempt, {})

    def find(self, peer: str, message: Message) -> Want | None:
        for wants in self._rooms.get(message.room, {}).values():
            want = wants.get(peer)
            if want is not None and want.generation == message.generation:
                return want
        return None

    def end(self, room: int, attempt: int, reason: str) -> dict[str, Want]:
        wants = self.of(room, attempt)
        del self._rooms[room][attempt]
        if not self._rooms[room]:
            del self._rooms[room]
        last = self._ended.pop(room, (attempt, reason))
        self._ended[room] = last if last[0] > attempt else (attempt, reason)  # the next one may be over before it
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        return wants

    def ended(self, room: int, attempt: int) -> str:
        """Reason why the attempt, or a later one, is over; "" if it is not known to be."""
        last, reason = self._ended.get(room, (-1, ""))
        return reason if attempt <= last else ""
