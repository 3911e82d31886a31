"""History: the events of one schedule, for oracles that judge while it runs or from a stored list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

from kvcheck.core.cache.backend.backend import (
    Footprint,
    LaneWaited,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.workload.events import ProcessActs

Handler = Callable[[Any], None]


class History:
    def __init__(self, *, keep: bool = False) -> None:
        self.events: list[Event] = []
        self.count = 0
        self._keep = keep
        self._handlers: dict[type, list[Handler]] = {}

    @staticmethod
    def of(*events: Event) -> History:
        history = History(keep=True)
        for event in events:
            history.emit(event)
        return history

    def listen(self, handlers: Iterable[tuple[type, Handler]]) -> None:
        for kind, handler in handlers:
            self._handlers.setdefault(kind, []).append(handler)

    def emit(self, event: Event) -> None:
        self.count += 1
        if self._keep:
            self.events.append(event)
        for handler in self._handlers.get(type(event), ()):
            handler(event)


class HostTrace:
    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Submitted, self._submitted),
            (Recorded, self._recorded),
            (LaneWaited, self._lane_waited),
            (ProcessJoined, self._joined),
            (ProcessDrained, self._drained),
            (ProcessActs, self._acts),
        )

    @property
    def number(self) -> int:
        return int.from_bytes(self._hash.digest(), "big")

    def _submitted(self, event: Submitted) -> None:
        self._hash.update(f"S{event.name}|{event.lane}|{event.request}|{event.record}".encode())
        for mark, footprints in ((b"r", event.reads), (b"w", event.writes)):
            for footprint in footprints:
                self._hash.update(mark)
                self._touched(footprint)

    def _touched(self, footprint: Footprint) -> None:
        self._hash.update(f"{footprint.space}{footprint.buffers}{footprint.layers}".encode())
        for ids in (footprint.rows, footprint.spans):
            if ids is not None:
                self._hash.update(ids.tobytes())

    def _recorded(self, event: Recorded) -> None:
        self._hash.update(f"R{event.record}|{event.lane}".encode())

    def _lane_waited(self, event: LaneWaited) -> None:
        self._hash.update(f"L{event.record}|{event.lane}".encode())

    def _joined(self, event: ProcessJoined) -> None:
        self._hash.update(f"J{event.record}".encode())

    def _drained(self, event: ProcessDrained) -> None:
        self._hash.update(b"D")

    def _acts(self, event: ProcessActs) -> None:
        self._hash.update(f"P{event.process}".encode())
