"""ProcessWire: a rank's end of a wire to ranks in other processes; and SocketWire, which sends bytes on the links.

Invariants:
- Messages travel on the link to their peer, in order. A lost peer's messages are delivered before its loss.
- For each open Want of a lost peer the wire delivers one Abort in the peer's place.
- A peer that is silent for `lease_s` seconds counts as lost. If it goes on later, it finds its links closed.
- `receive` and `write` are called by one thread. Link threads write registered memory (DATA) and queue the rest.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Condition
from typing import ClassVar

import numpy as np
import torch

from kvcheck.core.base.errors import TransferError
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Want, decode, encode
from kvcheck.core.cache.transfer.sockets.link import LEASE_S, MOST_BYTES, FrameKind, Link, LinkLost, Pulse
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket, check_region
from kvcheck.kernels.page_copy import copy_bytes_torch

COUNTS = struct.Struct("=HI")
BYTES_OF_A_FRAME = 1 << 20
LOOK_S = 0.2
"""Interval at which a wire that waits for its peers checks for lost ones."""


def in_time(leg: str, ticket: Ticket) -> float:
    return 0.0


class ProcessWire(ABC):
    """A Wire without the byte copies, which `_move` adds. paths: leg -> "ordered" or "async", and late_s: delay of a
    copy in seconds; only if takes_paths."""

    takes_paths: ClassVar[bool] = False

    def __init__(self, backend: ScopedBackend, *, pulse: type[Pulse] = Pulse) -> None:
        self.name = backend.scope
        self.backend = backend
        self.regions: dict[str, torch.Tensor] = {}
        self.links: dict[str, Link] = {}
        self._arrived: deque[tuple[str, FrameKind, bytearray]] = deque()
        self._asked: dict[tuple[str, int], tuple[int, int]] = {}
        self._gone: list[str] = []
        self._pulse = pulse
        self.network: str | None = None
        self.paths: Mapping[str, str] = {}
        self.late_s: Callable[[str, Ticket], float] = in_time

    def register(self, region: str, memory: torch.Tensor) -> None:
        check_region(region, memory)
        self.regions[region] = memory

    def start(self, links: Sequence[Link], *, lease_s: float = LEASE_S) -> None:
        """Start the links, after all regions are registered."""
        self.links = {link.peer: link for link in links}
        for link in links:
            link.start(self._take)
        self._pulse(links, lease_s=lease_s)

    def _await(self, has_come: Callable[[str], bool], what: str, within_s: float, changed: Condition) -> None:
        deadline = time.monotonic() + within_s
        with changed:
            while missing := [peer for peer, link in self.links.items() if not has_come(peer) and not link.is_lost]:
                if time.monotonic() > deadline:
                    raise TransferError(f"{self.name}: no {what} of {', '.join(missing)} after {within_s} s")
                changed.wait(LOOK_S)  # a peer that is lost meanwhile sends nothing

    def write(
        self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: Sequence[Signal]
    ) -> Signal:
        """Raise TransferError if the peer is gone."""
        for signal in after:
            self.backend.wait(signal)
        if self.links[peer].is_lost:
            raise TransferError(f"{self.name} to {peer}: {peer} is gone; {leg} of room {ticket.room} is not written")
        return self._move(peer, leg, writes, ticket)

    def flush(self, peer: str) -> Signal:
        """Reached: writes are handed over before they return, and messages are behind them."""
        return self.backend.signal()

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        """Send a message; it is lost if the peer is gone. After a Drained the peer's loss no longer aborts the room."""
        for signal in after:
            self.backend.wait(signal)
        key = (peer, message.room)
        if isinstance(message, Drained) and self._asked.get(key, (0, -1))[1] == message.generation:
            del self._asked[key]
        self._tell(peer, FrameKind.MESSAGE, encode(message))

    def receive(self) -> list[tuple[str, Message]]:
        """Messages that have arrived, and the Aborts of peers that are gone."""
        messages: list[tuple[str, Message]] = []
        unsafe: list[tuple[str, FrameKind, bytearray]] = []
        while self._arrived:
            peer, kind, payload = self._arrived.popleft()
            if kind is FrameKind.MESSAGE:
                messages += self._message(peer, payload)
            elif kind is FrameKind.FENCE:
                self._fence_asked(peer, payload)
            elif kind is FrameKind.GONE and not self._make_safe(peer):
                unsafe.append((peer, kind, payload))
            elif kind is FrameKind.GONE:
                self._gone.append(peer)
                for key in [key for key in self._asked if key[0] == peer]:
                    attempt, generation = self._asked.pop(key)
                    abort = Abort(room=key[1], attempt=attempt, generation=generation, reason=f"{peer} is gone")
                    messages.append((peer, abort))
        self._arrived.extend(unsafe)
        return messages

    def gone(self) -> tuple[str, ...]:
        return tuple(self._gone)

    def verified(self, peer: str, ticket: Ticket) -> None:
        return

    # Defined by each kind of wire

    @abstractmethod
    def _move(self, peer: str, leg: str, writes: Sequence[RegionWrite], ticket: Ticket) -> Signal:
        """Copy the blocks. Return the signal of `write`. Raise TransferError."""

    def _make_safe(self, peer: str) -> bool:
        """True once no write of a lost peer can land here; retried at every `receive`. Bytes on a link have landed
        before its loss is reported."""
        return True

    def _fence_asked(self, peer: str, payload: bytearray) -> None:
        """A write of the peer to this rank failed."""
        self.links[peer].close()

    def _take_data(self, peer: str, payload: bytearray) -> None:
        """Take bytes for a region, in the link's thread."""
        raise TransferError(f"{peer} sent bytes on a link that carries messages")

    @abstractmethod
    def _take_engine(self, peer: str, payload: bytearray) -> None:
        """Take the peer's announcement of its engine or memory, in the link's thread."""

    def _tell(self, peer: str, kind: FrameKind, *parts: bytes | memoryview) -> bool:
        try:
            self.links[peer].send(kind, *parts)
        except LinkLost:
            return False  # the link's thread reports it behind the peer's last frame
        return True

    def _take(self, peer: str, kind: FrameKind, payload: bytearray) -> None:
        if kind is FrameKind.DATA:
            self._take_data(peer, payload)
        elif kind is FrameKind.ENGINE:
            self._take_engine(peer, payload)
        else:
            self._arrived.append((peer, kind, payload))

    def _message(self, peer: str, payload: bytearray) -> Iterator[tuple[str, Message]]:
        try:
            message = decode(bytes(payload))
        except TransferError:
            self.links[peer].close()  # a peer that sends invalid messages is cut off
            return
        if isinstance(message, Want):
            self._asked[peer, message.room] = (message.attempt, message.generation)
        elif isinstance(message, (Done, Abort)):
            self._asked.pop((peer, message.room), None)
        yield peer, message


class SocketWire(ProcessWire):
    def _move(self, peer: str, leg: str, writes: Sequence[RegionWrite], ticket: Ticket) -> Signal:
        for write in writes:
            source = memoryview(self.regions[write.source].numpy().data)
            name = write.target.encode()
            for blocks in _frames(write.blocks.tolist()):
                places = np.array([block[1:] for block in blocks], dtype=np.int64)
                head = COUNTS.pack(len(name), len(blocks)) + name + places.tobytes()
                pieces = [source[start : start + size] for start, _, size in blocks]
                if not self._tell(peer, FrameKind.DATA, head, *pieces):
                    raise TransferError(f"{self.name} to {peer}: {peer} is gone; {leg} of room {ticket.room} is lost")
        return self.backend.signal()  # never recorded: reached

    def _take_data(self, peer: str, payload: bytearray) -> None:
        length, count = COUNTS.unpack_from(payload)
        at = COUNTS.size + length
        name = bytes(payload[COUNTS.size : at]).decode()
        end = at + 16 * count
        places = np.frombuffer(payload, dtype=np.int64, count=2 * count, offset=at).reshape(-1, 2)
        into = _region(self.regions, name, peer)
        if len(places) and (places.min() < 0 or places.sum(axis=1).max() > len(into)):
            raise TransferError(f"{peer} writes outside region {name} of {len(into)} bytes")
        if end + int(places[:, 1].sum()) != len(payload):
            raise TransferError(f"{peer} sent {len(payload) - end} bytes for {count} blocks of other lengths")
        data = torch.frombuffer(payload, dtype=torch.uint8)
        for start, size in places.tolist():
            copy_bytes_torch(into[start : start + size], data[end : end + size])
            end += size

    def _take_engine(self, peer: str, payload: bytearray) -> None:
        raise TransferError(f"{peer} has an engine, and this end has none")


def _frames(blocks: list[list[int]]) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    size = 0
    for source, target, length in blocks:
        done = 0
        while done < length:
            part = min(length - done, BYTES_OF_A_FRAME)
            if group and size + part > BYTES_OF_A_FRAME:
                yield group
                group, size = [], 0
            group.append([source + done, target + done, part])
            size, done = size + part, done + part
    if group:
        yield group


def _region(regions: Mapping[str, torch.Tensor], name: str, peer: str) -> torch.Tensor:
    if name not in regions:
        raise TransferError(f"{peer} writes region {name!r}; there are {', '.join(regions)}")
    return regions[name]


assert BYTES_OF_A_FRAME * 4 < MOST_BYTES, "blocks of a byte each bring 16 bytes of place with them"
