"""The eager backend: every operation runs when it is submitted, on the CPU. It hides every ordering mistake.

Invariants:
- Events have the requested waits, not the order of execution. So they show a missing wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.core.cache.backend.backend import (
    Completed,
    Footprint,
    Graph,
    HostMemory,
    Lane,
    LaneWaited,
    Operation,
    Place,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Signal,
    Submitted,
)
from kvcheck.core.cache.backend.graphs import Captures
from kvcheck.core.cache.events import Emit


class EagerBackend(HostMemory):
    """A handle is the record's number."""

    name = "eager"
    device = torch.device("cpu")

    def __init__(self, emit: Emit | None = None) -> None:
        super().__init__()
        self._emit = emit
        self._lanes: dict[str, Lane] = {}
        self._captures = Captures()
        self.capture = self._captures.capture
        self._submitted = 0
        self._records = 0

    def lane(self, name: str) -> Lane:
        return self._lanes.setdefault(name, Lane(len(self._lanes), name))

    def signal(self) -> Signal:
        return Signal()

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        if self._captures.covers(lane):
            return self._captures.take(operation, reads, writes)
        self._submitted += 1
        self._records += 1
        ordinal, record = self._submitted, self._records
        if self._emit is None:  # then only the work itself is needed
            for chunk in operation.chunks:
                chunk()
            return Signal(record)
        for signal in after:
            self.wait(signal, lane=lane)
        self._emit(Submitted.of(ordinal, operation, lane, reads, writes, record))
        for chunk in operation.chunks:
            chunk()
        self._emit(Completed(ordinal))
        if any(f.place is Place.PAGEABLE for f in writes):
            self._emit(ProcessJoined(record))
        return Signal(record)

    def record(self, signal: Signal, *, lane: Lane) -> None:
        self._captures.refuse_record(lane)
        self._records += 1
        signal.handle = self._records
        if self._emit is not None:
            self._emit(Recorded(self._records, lane.name))

    def replay(self, graph: Graph) -> None:
        self._captures.check(graph)
        for each in graph.operations:
            self.submit(each.operation, lane=graph.lane, reads=each.reads, writes=each.writes)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if self._emit is None or not isinstance(signal.handle, int):
            return
        if lane is not None and self._captures.covers(lane):
            return
        if lane is None:
            self._emit(ProcessJoined(signal.handle))
        else:
            self._emit(LaneWaited(signal.handle, lane.name))

    def query(self, signal: Signal) -> bool:
        self.wait(signal)
        return True

    def idle(self) -> None: ...

    def drain(self) -> None:
        if self._emit is not None:
            self._emit(ProcessDrained())
