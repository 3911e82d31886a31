"""One room between a sender and a receiver of one rank each over the in-process wire, driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.events import Event, RoomChanged, RoomMarked, SealsFitted
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.transfer.layout import EndLayout, end_layout
from kvcheck.core.cache.transfer.loopback_wire import LoopbackFabric, LoopbackWire
from kvcheck.core.cache.transfer.messages import Message
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver, RoomLeft, RoomUnsealed
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.cache.transfer.wire import Ticket
from kvcheck.core.stress.workload.shapes import shape

PATIENCE = 20
SENDER_PATIENCE = 30


@dataclass(slots=True)
class Inbox:
    """What an onlooker was told.

    rooms: (rank, room, generation, old, new, reason). sizes: bytes that fit their seal. late: rooms whose seal never
    fitted.
    """

    rooms: list[tuple[str, int, int, int, int, str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    drains: list[int] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoomChanged):
            self.rooms.append((event.rank, event.room, event.generation, event.old, event.new, event.reason))
        elif isinstance(event, SealsFitted):
            self.sizes.append(event.size)
        elif isinstance(event, RoomMarked):
            self.marks.append(event.word)
        elif isinstance(event, RoomLeft):
            self.drains.append(event.room.ticket.room)
        elif isinstance(event, RoomUnsealed):
            self.late.append(event.room.ticket.room)


class Rig:
    """Both ends. page ids of the decode end start later, so that no page has the same id at both."""

    def __init__(
        self,
        name: str = "llama-3-tiny",
        *,
        backend: Backend | None = None,
        paths: Mapping[str, str] | None = None,
        refuses: Callable[[str, str, str, Ticket], bool] | None = None,
        tamper: Callable[[Message], Message] | None = None,
        aux_over_messages: bool = False,
    ) -> None:
        self.shape = shape(name)
        self.now = 0
        self.told = Inbox()
        self.rooms: dict[int, InboundRoom] = {}
        """By number: what was asked for last."""
        self.backend = backend or EagerBackend()
        self.fabric = LoopbackFabric(
            paths=paths, refuses=refuses or (lambda *_: False), tamper=tamper or (lambda message: message)
        )
        self.prefill, self.decode = self._end("prefill"), self._end("decode")
        self.sender = Sender(
            self.prefill.pool,
            self.prefill.metadata,
            self.prefill.wire,
            self.prefill.backend,
            layout=self.prefill.layout,
            peers=[self.decode.layout],
            clock=lambda: self.now,
            patience=SENDER_PATIENCE,
            aux_over_messages=aux_over_messages,
        )
        self.receiver = Receiver(
            self.decode.pool,
            self.decode.metadata,
            self.decode.wire,
            self.decode.backend,
            layout=self.decode.layout,
            peers=[self.prefill.layout],
            clock=lambda: self.now,
            patience=PATIENCE,
            emit=self.told,
        )
        spare = self.decode.pool.open(99)
        assert spare is not None and self.decode.pool.grow(spare, 2 * self.shape.page_size, query=0)
        self.backend.drain()

    def _end(self, name: str) -> End:
        backend = ScopedBackend(self.backend, f"{name}-0")
        window = 12 if self.shape.window_layers else 0
        sizes = PoolSizes(pages=14, requests=5, max_tokens=400, window_pages=window, state_slots=6)
        pool = KVPool(self.shape, sizes, backend=backend)
        metadata = MetadataBuffers(
            name,
            slots=4,
            hidden_size=16,
            backend=backend,
            lane=backend.lane("forward"),
            align=8 if name == "prefill" else 512,
        )
        layout = end_layout(pool, metadata, whole=self.shape, rank=0, ranks=1)
        dice = np.random.default_rng(len(name))
        for space, buffer in pool.buffers():
            words = pool.sets[space].write_view(buffer.name)
            words.copy_(torch.from_numpy(dice.integers(1, 1 << 60, tuple(words.shape), dtype=np.int64)))
        return End(backend, pool, metadata, layout, self.fabric.end(backend))

    # The decode end

    def expect(self, room: int, tokens: int, *, request: int = 1, slot: int | None = None) -> Room:
        holding = held(self.decode.pool, request, tokens + 1, query=tokens)
        slot = self.decode.metadata.lease(request) if slot is None else slot
        assert slot is not None
        self.rooms[room] = self.receiver.expect(room, holding, tokens, slot)
        return Room(room, request, tokens, holding, slot)

    def poll(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.now += 1
            self.sender.poll()
            self.receiver.poll()

    # The prefill end

    def prefill_room(self, room: int, tokens: int, *, request: int = 1, chunk: int | None = None) -> Room:
        """Compute and send a room, chunk by chunk, up to the point where it is sealed."""
        sent = self.begin(room, tokens, request=request)
        step = chunk or tokens
        for stop in (*range(step, tokens, step), tokens):
            self.sender.send_pages(room, stop, self.done())
        self.finish(sent)
        return sent

    def begin(self, room: int, tokens: int, *, request: int = 1, query: int = 0) -> Room:
        self.sender.open(room, request, tokens)
        return self.begin_opened(room, tokens, request=request, query=query)

    def begin_opened(self, room: int, tokens: int, *, request: int = 1, query: int = 0) -> Room:
        self.sender.poll()
        holding = held(self.prefill.pool, request, tokens, query=query)
        self.sender.begin(room, holding)
        slot = self.prefill.metadata.lease(request)
        assert slot is not None
        return Room(room, request, tokens, holding, slot)

    def finish(self, sent: Room) -> None:
        ids = torch.arange(sent.request, sent.request + 5, dtype=torch.int32)
        written = self.prefill.metadata.set(sent.slot, sent.request, {"output_ids": ids})
        self.sender.finish(sent.number, sent.slot, (self.done(), written))

    def done(self) -> Signal:
        signal = self.prefill.backend.signal()
        self.prefill.backend.record(signal, lane=self.prefill.pool.forward)
        return signal

    # Both

    def differs(self, sent: Room, got: Room) -> list[str]:
        """Buffers of which some row that the prompt needs is not the source's."""
        found = []
        size = self.shape.page_size
        pages = -(-sent.tokens // size)
        first_seen = max(0, sent.tokens + 1 - self.shape.window) // size
        for space, buffer in self.prefill.pool.buffers():
            one, other = (end.pool.sets[space].write_view(buffer.name) for end in (self.prefill, self.decode))
            for at in range(first_seen, pages) if space == "window" else [0] if space == "state" else range(pages):
                units = [unit_of(each.holding, space, at) for each in (sent, got)]
                step = size if buffer.rows is Granularity.TOKEN else 1
                rows = [range(unit * step, (unit + 1) * step) for unit in units]
                if not torch.equal(one[:, rows[0]], other[:, rows[1]]):
                    found.append(f"{space}.{buffer.name}, page {at}")
        mine = self.prefill.metadata.row_view(sent.slot)
        if not torch.equal(mine, self.decode.metadata.row_view(got.slot)):
            found.append("metadata")
        return found


@dataclass(frozen=True, slots=True)
class End:
    backend: ScopedBackend
    pool: KVPool
    metadata: MetadataBuffers
    layout: EndLayout
    wire: LoopbackWire


@dataclass(frozen=True, slots=True)
class Room:
    number: int
    request: int
    tokens: int
    holding: Holding
    slot: int


def held(pool: KVPool, request: int, tokens: int, *, query: int) -> Holding:
    holding = pool.open(request)
    assert holding is not None
    assert pool.grow(holding, tokens, query=query)
    pool.commit(holding, tokens)
    return holding


def unit_of(holding: Holding, space: str, page: int) -> int:
    """The page or slot behind a logical page."""
    if space == "state":
        return holding.state_slot
    return int((holding.window_pages if space == "window" else holding.pages)[page])
