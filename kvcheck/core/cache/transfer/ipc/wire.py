"""IpcWire: a rank's wire to ranks of the same machine whose memory it maps and writes itself.

Invariants:
- Copies run in a thread, or on a stream. The peer gets no notice of their landing.
- The peer's latest announcement of memory and fence counts. Nothing of it is unpickled.
- A lost peer counts as gone once this side's fence is shut.
- A host has the store order of its CPU, which is stronger than that of a device or of NVLink.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import LayoutMismatch, TransferError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.copy_lane import CopyLane, Landing, copy_and_join
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion
from kvcheck.core.cache.transfer.messages import Message
from kvcheck.core.cache.transfer.sockets.link import LEASE_S, FrameKind, Link
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket, check_blocks

READY_S = 60.0
WORD = 8
"""Bytes of a word; blocks are cut between words."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(target, source) of each block, [bytes] uint8."""


# writer, for each copy    take a shared lock of the fence, copy, release it; no lock, no copy
# owner, for a lost peer   take the exclusive lock: then no copy is in progress, and none begins
class Fence:
    def __init__(self, peer: str) -> None:
        self._region = SharedRegion(f"fence-{peer}", 1)

    def share(self) -> object:
        return to_plain(self._region.handle)

    def shut(self) -> bool:
        return _try_lock(self._region.fileno(), fcntl.LOCK_EX)


class FenceWriter:
    """A writer's side, one for each copying thread, since a lock belongs to an open file."""

    def __init__(self, handle: RegionHandle) -> None:
        self._region = SharedRegion.attach(handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """True if copies are allowed in the block."""
        lock = self._region.fileno()
        if not _try_lock(lock, fcntl.LOCK_SH):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def close(self) -> None:
        self._region.close()


def read_fence(raw: object) -> RegionHandle:
    handle: RegionHandle = value_from(RegionHandle, raw, "fence")
    return handle


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Mapped:
    said: bytes
    fence: RegionHandle
    regions: Mapping[str, torch.Tensor]


# ordered   one lane a peer; a write is reported once its bytes are in the peer's memory
# async     one lane a leg; a write is reported when it is queued, as by a copy engine without completion
class IpcWire(ProcessWire):
    takes_paths = True

    def __init__(self, backend: ScopedBackend) -> None:
        super().__init__(backend)
        self._fences: dict[str, Fence] = {}
        self._announced: dict[str, bytes] = {}
        self._has_announced = threading.Condition()
        self._mapped: dict[str, _Mapped] = {}
        self._lanes: dict[str, dict[str, tuple[CopyLane, FenceWriter]]] = {}
        self._behind: dict[str, deque[tuple[Message, Sequence[Signal]]]] = {}

    def start(self, links: Sequence[Link], *, lease_s: float = LEASE_S) -> None:
        super().start(links, lease_s=lease_s)
        self._announce_to(self.links)
        self._await(lambda peer: peer in self._announced, "memory", READY_S, self._has_announced)
        for link in links:
            if not link.is_lost:
                self._memory_of(link.peer)

    def flush(self, peer: str) -> Signal:
        return Signal(Landing(lane.end for lane, _ in self._lanes.get(peer, {}).values()))

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        """Send it once its copies have landed, without blocking, and in order."""
        self._behind.setdefault(peer, deque()).append((message, after))
        self._send_due(peer)

    def receive(self) -> list[tuple[str, Message]]:
        for peer in self._behind:
            self._send_due(peer)
        return super().receive()

    def _send_due(self, peer: str) -> None:
        waiting = self._behind[peer]
        while waiting and all(self.backend.query(signal) for signal in waiting[0][1]):
            super().send(peer, waiting.popleft()[0])

    def _move(self, peer: str, leg: str, writes: Sequence[RegionWrite], ticket: Ticket) -> Signal:
        memory = self._memory_of(peer)
        path = self.paths.get(leg, "ordered")
        lane, entry = self._lane(peer, path if path == "ordered" else f"{path}.{leg}", memory.fence)
        parts = self._parts(peer, memory, writes)
        landing = lane.submit(partial(_land, entry, parts, self.late_s(leg, ticket)))
        return Signal(landing) if path == "ordered" else self.backend.signal()

    def _parts(self, peer: str, memory: _Mapped, writes: Sequence[RegionWrite]) -> tuple[Pairs, Pairs]:
        """Pairs in two parts, which land one behind the other: about half of the blocks of each write."""
        parts: tuple[Pairs, Pairs] = ([], [])
        for write in writes:
            if write.target not in memory.regions:
                known = ", ".join(memory.regions)
                raise TransferError(f"{self.name} to {peer}: it has no region {write.target!r}; it has {known}")
            source, target = self.regions[write.source], memory.regions[write.target]
            check_blocks(write, source=len(source), target=len(target), who=f"{self.name} to {peer}")
            for part, blocks in zip(parts, _cut(write.blocks), strict=True):
                part += [(target[to : to + size], source[at : at + size]) for at, to, size in blocks.tolist()]
        return parts

    def _lane(self, peer: str, path: str, fence: RegionHandle) -> tuple[CopyLane, FenceWriter]:
        lanes = self._lanes.setdefault(peer, {})
        if path not in lanes:
            entry = FenceWriter(fence)
            lanes[path] = CopyLane(f"{self.name}>{peer}:{path}", self.backend.device), entry
        return lanes[path]

    # Memory of the peers

    def _announce_to(self, peers: Iterable[str]) -> None:
        memory = self._memory()
        regions = {name: memory.share(tensor) for name, tensor in self.regions.items()}
        for peer in peers:
            fence = self._fences[peer] = Fence(peer)
            self._tell(peer, FrameKind.ENGINE, json.dumps({"fence": fence.share(), "regions": regions}).encode())

    def _take_engine(self, peer: str, payload: bytearray) -> None:
        with self._has_announced:
            self._announced[peer] = bytes(payload)
            self._has_announced.notify_all()

    def _memory_of(self, peer: str) -> _Mapped:
        said = self._announced.get(peer)
        if said is None:
            raise TransferError(f"{self.name} to {peer}: it has announced no memory, or is gone")
        mapped = self._mapped.get(peer)
        if mapped is None or mapped.said is not said:
            for lane, entry in self._lanes.pop(peer, {}).values():
                lane.close(entry.close)
            mapped = self._mapped[peer] = self._map(peer, said)
        return mapped

    def _map(self, peer: str, said: bytes) -> _Mapped:
        memory = self._memory()
        try:
            raw = json.loads(said)
            fence, handles = read_fence(raw["fence"]), dict(raw["regions"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TransferError(f"{peer} announced no memory: {said[:60]!r}") from error
        try:
            return _Mapped(said, fence, {str(name): memory.attach(handle) for name, handle in handles.items()})
        except TransferError as error:
            raise TransferError(
                f"{self.name} cannot map the memory of {peer}; expected ranks of one machine and user: {error}"
            ) from error

    def _memory(self) -> RegionBackend:
        memory = self.backend.inner
        if not isinstance(memory, RegionBackend):
            raise LayoutMismatch(f"transport ipc needs memory that two processes map, got {memory.name}")
        return memory

    # Peers that are gone

    def _make_safe(self, peer: str) -> bool:
        is_shut = self._fences[peer].shut()
        if is_shut:
            with self._has_announced:
                self._announced.pop(peer, None)
            self._behind.pop(peer, None)  # for a process that has ended
        return is_shut


def _land(entry: FenceWriter, parts: tuple[Pairs, Pairs], late_s: float) -> None:
    """Copy a write under the fence, its second part `late_s` seconds later."""
    for number, pairs in enumerate(parts):
        if number and late_s:
            time.sleep(late_s)
        with entry.entered() as is_in:
            if is_in:
                copy_and_join(pairs)


def _cut(blocks: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The blocks, [n, 3], in two parts; a single one is split."""
    if len(blocks) != 1:
        return blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    at, to, size = blocks[0].tolist()
    half = size // (2 * WORD) * WORD
    return np.array([[at, to, half]]), np.array([[at + half, to + half, size - half]])
