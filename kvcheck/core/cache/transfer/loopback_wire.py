"""The in-process wire: completion, visibility and notification are three events that the schedule orders.

Invariants:
- The bytes of a write land in pieces, in any order. On the path "ordered" writes of one pair of ends are in order; on
  "async" only those of one leg are.
- Messages are unordered with writes. Copies of messages have another lane, and come late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import TransferError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import ChunkWork, Lane, Operation, Signal
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.messages import AuxData, Drained, Message
from kvcheck.core.cache.transfer.wire import LEGS, RegionWrite, Ticket, check_blocks, check_region
from kvcheck.kernels.page_copy import copy_bytes_torch

# ordered   write -> landed -> sent          as RDMA or TCP with an acknowledgement
# async     write -> sent,  write -> landed  as an engine that reports a copy when it has queued it
PATHS = ("ordered", "async")
PIECES = 4
"""Chunks of a write; more make no new kind of torn row and cost time."""

LATE = 6
"""Copies of messages to a peer that are held back until another one joins them."""

Fault = Callable[[str, str, str, Ticket], bool]
"""True if the engine refuses a write: (writer, peer, leg, ticket)."""


def no_fault(writer: str, peer: str, leg: str, ticket: Ticket) -> bool:
    return False


Tamper = Callable[[Message], Message]
"""Changes a message in transit; most stay unchanged."""


def unchanged(message: Message) -> Message:
    return message


Copies = Callable[[str, str, Message], int]
"""Number of arrivals of a message: (sender, peer, message)."""


def once(sender: str, peer: str, message: Message) -> int:
    return 1


class LoopbackFabric:
    """refuses: writes that fail at once. vanishes: writes that are reported and never land."""

    def __init__(
        self,
        *,
        paths: Mapping[str, str] | None = None,
        refuses: Fault = no_fault,
        vanishes: Fault = no_fault,
        tamper: Tamper = unchanged,
        copies: Copies = once,
    ) -> None:
        self.paths = dict.fromkeys(LEGS, "ordered") | dict(paths or {})
        self.refuses = refuses
        self.vanishes = vanishes
        self.tamper = tamper
        self.copies = copies
        self.ends: dict[str, LoopbackWire] = {}
        self._pieces: Counter[tuple[int, str]] = Counter()
        self._heard: dict[int, dict[tuple[str, str, Message], None]] = {}

    def end(self, backend: ScopedBackend) -> LoopbackWire:
        made = LoopbackWire(self, backend)
        self.ends[backend.scope] = made
        return made

    def is_under_way(self, room: int, leg: str) -> bool:
        """True while bytes of this leg are in flight. A device runs ahead of this."""
        return self._pieces[room, leg] > 0

    def under_way(self, room: int, leg: str, piece: ChunkWork) -> ChunkWork:
        self._pieces[room, leg] += 1
        return partial(self._land, (room, leg), piece)

    def _land(self, key: tuple[int, str], piece: ChunkWork) -> None:
        piece()
        self._pieces[key] -= 1

    def heard(self, sender: str, peer: str, message: Message) -> None:
        self._heard.setdefault(message.room, {})[sender, peer, message] = None

    def repeat(self, room: int, *, turn: int) -> bool:
        """Deliver a copy of an earlier message, picked by `turn`. False if there is none."""
        heard = list(self._heard.get(room, {}))
        if heard:
            sender, peer, message = heard[turn % len(heard)]
            self.ends[sender].deliver(peer, "copies", message, ())
        return bool(heard)


class LoopbackWire:
    def __init__(self, fabric: LoopbackFabric, backend: ScopedBackend) -> None:
        self.name = backend.scope
        self.backend = backend
        self._fabric = fabric
        self.regions: dict[str, torch.Tensor] = {}
        self.inbox: list[tuple[str, Message, list[Signal]]] = []
        self._late: dict[str, deque[tuple[Message, Sequence[Signal]]]] = {}
        self.landing: dict[tuple[str, Ticket], list[Signal]] = {}

    def register(self, region: str, memory: torch.Tensor) -> None:
        check_region(region, memory)
        self.regions[region] = memory

    def write(
        self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: Sequence[Signal]
    ) -> Signal:
        if self._fabric.refuses(self.name, peer, leg, ticket):
            raise TransferError(f"{self.name} to {peer}: the engine refused to write {leg} for room {ticket.room}")
        target = self._fabric.ends[peer]
        if self._fabric.vanishes(self.name, peer, leg, ticket):
            return self._report(peer, leg, ticket, after)
        pieces = [piece for write in writes for piece in self._chunks(target, write)]
        chunks = [self._fabric.under_way(ticket.room, leg, piece) for piece in pieces]
        reads = [each for write in writes for each in self.backend.own(write.reads)]
        landing = [each for write in writes for each in target.backend.own(write.writes)]
        path = self._fabric.paths[leg]
        inner = self.backend.inner
        landed = inner.submit(
            Operation(f"wire.{leg}", tuple(chunks), ticket.request),
            lane=self._lane(peer, path, leg),
            reads=reads,
            writes=landing,
            after=after,
        )
        target.landing.setdefault((self.name, ticket), []).append(landed)
        if path == "ordered":
            return landed
        return self._report(peer, leg, ticket, after)

    def _report(self, peer: str, leg: str, ticket: Ticket, after: Sequence[Signal]) -> Signal:
        """The engine's completion, independent of the landing."""
        return self.backend.inner.submit(
            Operation(f"wire.{leg}.sent", (lambda: None,), ticket.request),
            lane=self._lane(peer, "completion"),
            after=after,
        )

    def flush(self, peer: str) -> Signal:
        inner, lane = self.backend.inner, self._lane(peer, "flush")
        ends = []
        for path, leg in (("ordered", ""), *(("async", leg) for leg in LEGS)):
            end = inner.signal()
            inner.record(end, lane=self._lane(peer, path, leg))
            ends.append(end)
        return inner.submit(Operation("wire.flush", (lambda: None,)), lane=lane, after=ends)

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        sent = self._fabric.tamper(message)
        for number in range(self._fabric.copies(self.name, peer, message)):
            if not number:
                self.deliver(peer, "message", sent, after)
                continue
            late = self._late.setdefault(peer, deque())
            late.append((sent, after))
            if len(late) > LATE:
                self.deliver(peer, "copies", *late.popleft())

    def deliver(self, peer: str, lane: str, message: Message, after: Sequence[Signal]) -> None:
        arrived: list[Signal] = []
        entry = (self.name, message, arrived)
        kind = type(message).__name__.lower()
        piece: ChunkWork = partial(self._fabric.ends[peer].inbox.append, entry)
        if isinstance(message, AuxData):
            piece = self._fabric.under_way(message.room, "aux", piece)
        operation = Operation(f"wire.message.{kind}", (piece,))
        arrived.append(self.backend.inner.submit(operation, lane=self._lane(peer, lane), after=after))

    def receive(self) -> list[tuple[str, Message]]:
        """Take the messages that have arrived; the caller is then ordered behind their `after` signals."""
        # On a device the entry is in the inbox once the message is queued, before its operation runs. A Drained orders
        # no more than that: one that is sent too early leaves landings unordered.
        self.backend.inner.query(self.backend.inner.signal())  # time passes
        messages = []
        while self.inbox:
            sender, message, arrived = self.inbox[0]
            if not all(self.backend.inner.query(signal) for signal in arrived):
                break
            self.inbox.pop(0)
            self._fabric.heard(sender, self.name, message)
            if isinstance(message, Drained):
                done = (sender, message.room, message.generation)
                self.landing = {
                    key: value
                    for key, value in self.landing.items()
                    if (key[0], key[1].room, key[1].generation) != done
                }
            messages.append((sender, message))
        return messages

    def verified(self, peer: str, ticket: Ticket) -> None:
        for signal in self.landing.pop((peer, ticket), []):
            self.backend.inner.query(signal)

    def _lane(self, peer: str, path: str, leg: str = "") -> Lane:
        path = f"{path}.{leg}" if path == "async" else path
        return self.backend.inner.lane(f"{self.name}>{peer}:{path}")

    def _chunks(self, target: LoopbackWire, write: RegionWrite) -> list[ChunkWork]:
        source, into = self.regions[write.source], target.regions[write.target]
        check_blocks(write, source=len(source), target=len(into), who=f"{self.name} to {target.name}")
        blocks = write.blocks
        return [partial(_copy, source, into, piece) for piece in np.array_split(blocks, min(PIECES, len(blocks) or 1))]


def _copy(source: torch.Tensor, target: torch.Tensor, blocks: IndexArray) -> None:
    for start, to, size in blocks.tolist():
        copy_bytes_torch(target[to : to + size], source[start : start + size])
