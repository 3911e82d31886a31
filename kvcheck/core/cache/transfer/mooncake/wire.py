"""MooncakeWire: a rank's wire over the transfer engine. The rank and its engine process map the same memory.

Invariants:
- A failed write may leave bytes in flight at both ends. This side's engine process is killed before the error is
  raised, and the peer's before any message that releases the memory.
- A lost peer may have bytes in flight too. This side's engine is replaced before the loss is reported.
- A write goes to the engine that its peer announced last.
- No two engines of a rank have the same address, so a write to an older one fails.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict

from kvcheck.core.base.errors import LayoutMismatch, TransferError
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.backend.shared_memory import SharedRegion
from kvcheck.core.cache.transfer.mooncake.engine import MooncakeEngine, PeerInfo
from kvcheck.core.cache.transfer.mooncake.library import EngineSettings
from kvcheck.core.cache.transfer.mooncake.plan import BlockBatch
from kvcheck.core.cache.transfer.sockets.link import LEASE_S, FrameKind, Link
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket

READY_S = 120.0
SETTINGS = EngineSettings(transfer_s=5)


class MooncakeWire(ProcessWire):
    def __init__(self, backend: ScopedBackend) -> None:
        super().__init__(backend)
        self.engine: MooncakeEngine | None = None
        self._peers: dict[str, PeerInfo] = {}
        self._has_announced = threading.Condition()
        self._sessions: set[str] = set()
        self._writing = ""

    def start(self, links: Sequence[Link], *, lease_s: float = LEASE_S) -> None:
        self.engine = self._start_engine()
        super().start(links, lease_s=lease_s)
        self._announce()
        self._await(lambda peer: peer in self._peers, "engine", READY_S, self._has_announced)

    def _move(self, peer: str, leg: str, writes: Sequence[RegionWrite], ticket: Ticket) -> Signal:
        info, engine = self._peers.get(peer), self.engine
        if info is None:
            raise TransferError(f"{self.name} to {peer}: it has no engine; {leg} of room {ticket.room} stays here")
        assert engine is not None
        with self._has_announced:
            if self.links[peer].is_lost:
                raise TransferError(f"{self.name} to {peer}: {peer} is gone; {leg} of room {ticket.room} stays here")
            self._writing = peer
        try:
            engine.write(info, [BlockBatch(each.source, each.target, each.blocks) for each in writes])
        except TransferError as error:
            if engine.is_poisoned:
                self._renew()
                self._tell(peer, FrameKind.FENCE, json.dumps({"session": info.session}).encode())
            raise TransferError(f"{self.name} to {peer}: {leg} of room {ticket.room}: {error}") from error
        finally:
            with self._has_announced:
                self._writing = ""
        return self.backend.signal()  # never recorded: reached

    def _take(self, peer: str, kind: FrameKind, payload: bytearray) -> None:
        """End a write to a lost peer at once, not at the library's timeout."""
        if kind is FrameKind.GONE:
            with self._has_announced:
                if self._writing == peer and self.engine is not None:
                    self.engine.fence()
        super()._take(peer, kind, payload)

    def _make_safe(self, peer: str) -> bool:
        with self._has_announced:
            self._peers.pop(peer, None)
        self._renew()
        return True

    def _fence_asked(self, peer: str, payload: bytearray) -> None:
        with contextlib.suppress(ValueError):  # no JSON: it names no session of ours
            if self.engine is not None and json.loads(payload) == {"session": self.engine.session}:
                self._renew()

    def _take_engine(self, peer: str, payload: bytearray) -> None:
        try:
            said = json.loads(payload)
            regions = {str(name): (int(at), int(size)) for name, (at, size) in said["regions"].items()}
            info = PeerInfo(str(said["session"]), regions)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TransferError(f"{peer} announced no engine: {bytes(payload[:60])!r}") from error
        with self._has_announced:
            self._peers[peer] = info
            self._has_announced.notify_all()

    def _announce(self) -> None:
        assert self.engine is not None
        text = json.dumps(asdict(self.engine.info)).encode()
        for peer in self.links:
            self._tell(peer, FrameKind.ENGINE, text)

    def _renew(self) -> None:
        """Replace the engine, so that the old one cannot touch this memory any more."""
        assert self.engine is not None
        self.engine.fence()
        self.engine = self._start_engine()
        self._announce()

    def _start_engine(self) -> MooncakeEngine:
        while True:
            engine = MooncakeEngine(self._shared(), network=self.network, settings=SETTINGS)
            if engine.session not in self._sessions:
                self._sessions.add(engine.session)
                return engine
            engine.fence()

    def _shared(self) -> dict[str, SharedRegion]:
        memory = self.backend.inner
        if not isinstance(memory, RegionBackend):
            raise LayoutMismatch(f"transport mooncake needs memory that two processes map, got {memory.name}")
        shared: dict[str, SharedRegion] = {}
        for name, tensor in self.regions.items():
            region = memory.region_of(tensor)
            if not isinstance(region, SharedRegion):
                raise LayoutMismatch(f"transport mooncake needs host memory, got {name} on {memory.device}")
            shared[name] = region
        return shared
