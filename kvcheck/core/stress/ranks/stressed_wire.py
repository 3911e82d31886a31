"""StressedWire: a rank's wire with the faults and stalls of the plan; the quarantine sees its messages.

Invariants:
- A held leg also holds later writes of the same room and peer. The end of the room drops writes that are still held.
- A held write that fails ends its room, like one that fails at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.errors import TransferError
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.transfer.messages import Abort, AuxData, Drained, Message, Status
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket
from kvcheck.core.stress.ranks.quarantine import Quarantine
from kvcheck.core.stress.ranks.stalls import Stalls
from kvcheck.core.stress.scenarios.pd_transfer import Faults

Key = tuple[str, int, int]
"""Peer, room, generation."""


@dataclass(slots=True)
class _Held:
    until: float
    attempt: int
    steps: list[Callable[[], object]] = field(default_factory=list)


class StressedWire:
    def __init__(self, inner: ProcessWire, faults: Faults, stalls: Stalls, quarantine: Quarantine) -> None:
        self.name = inner.name
        self.inner = inner
        self._faults = faults
        self._stalls = stalls
        self._quarantine = quarantine
        self._held: dict[Key, _Held] = {}
        self._gone: set[str] = set()
        self.register = inner.register
        self.flush = inner.flush
        self.verified = inner.verified

    def write(
        self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: Sequence[Signal]
    ) -> Signal:
        if self._faults.refuses(self.name, peer, leg, ticket):
            raise TransferError(f"{self.name} to {peer}: the engine refused to write {leg} for room {ticket.room}")
        if self._faults.vanishes(self.name, peer, leg, ticket):
            return self.inner.backend.signal()
        key = (peer, ticket.room, ticket.generation)
        if key not in self._held:
            held_s = self._stalls.held_s(leg, ticket)
            if held_s is None:
                return self.inner.write(peer, leg, writes, ticket=ticket, after=after)
            self._held[key] = _Held(time.monotonic() + held_s, ticket.attempt)
        self._held[key].steps.append(lambda: self.inner.write(peer, leg, writes, ticket=ticket, after=after))
        return self.inner.backend.signal()

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        message = self._faults.tamper(message)
        if peer not in self._gone:
            self._quarantine.sent(peer, message)
        key = (peer, message.room, message.generation)
        if key in self._held:
            if isinstance(message, AuxData) or (isinstance(message, Status) and message.is_ok):
                self._held[key].steps.append(lambda: self.inner.send(peer, message, after=after))
                return
            if isinstance(message, Drained | Status):
                del self._held[key]
        for _ in range(self._faults.copies(self.name, peer, message)):
            self.inner.send(peer, message, after=after)

    def receive(self) -> list[tuple[str, Message]]:
        """Return arrived messages, after the failures of held writes."""
        failures = self._release()
        messages = self.inner.receive()
        for peer, message in messages:
            self._quarantine.received(peer, message)
        gone = set(self.inner.gone())
        for peer in gone - self._gone:
            self._quarantine.gone(peer)
        self._gone = gone
        return failures + messages

    def _release(self) -> list[tuple[str, Message]]:
        failures: list[tuple[str, Message]] = []
        now = time.monotonic()
        for key in [key for key, held in self._held.items() if held.until <= now]:
            held = self._held.pop(key)
            try:
                for step in held.steps:
                    step()
            except TransferError as error:
                peer, room, generation = key
                abort = Abort(room=room, attempt=held.attempt, generation=generation, reason=str(error))
                failures.append((peer, abort))
        return failures
