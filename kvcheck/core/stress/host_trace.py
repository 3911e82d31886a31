"""HostTrace: a number for the process's actions in one schedule: its submissions, records, waits and poll results.

Schedules of one workload with equal host traces differ only in the order of concurrent operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.workload.events import (
    LaneWaited,
    ProcessActs,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)


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
