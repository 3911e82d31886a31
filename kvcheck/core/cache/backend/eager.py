"""The eager backend: every operation runs when it is submitted, on the CPU. It hides every ordering mistake.

Invariants:
- An observer gets the requested waits, not the order of execution. So it detects a missing wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.core.cache.backend.backend import (
    Footprint,
    Graph,
    HostMemory,
    Lane,
    Operation,
    OperationObserver,
    Place,
    Signal,
)
from kvcheck.core.cache.backend.graphs import Captures


class EagerBackend(HostMemory):
    """A handle is the record's number."""

    name = "eager"
    device = torch.device("cpu")

    def __init__(self, observer: OperationObserver | None = None) -> None:
        super().__init__()
        self._observer = observer
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
        if self._observer is None:  # without an observer only the work itself is needed
            for chunk in operation.chunks:
                chunk()
            return Signal(record)
        for signal in after:
            self.wait(signal, lane=lane)
        self._observer.submitted(ordinal, operation, lane, reads, writes, record)
        for chunk in operation.chunks:
            chunk()
        self._observer.completed(ordinal)
        if any(f.place is Place.PAGEABLE for f in writes):
            self._observer.process_joined(record)
        return Signal(record)

    def record(self, signal: Signal, *, lane: Lane) -> None:
        self._captures.refuse_record(lane)
        self._records += 1
        signal.handle = self._records
        if self._observer is not None:
            self._observer.recorded(self._records, lane)

    def replay(self, graph: Graph) -> None:
        self._captures.check(graph)
        for each in graph.operations:
            self.submit(each.operation, lane=graph.lane, reads=each.reads, writes=each.writes)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if self._observer is None or not isinstance(signal.handle, int):
            return
        if lane is not None and self._captures.covers(lane):
            return
        if lane is None:
            self._observer.process_joined(signal.handle)
        else:
            self._observer.lane_waited(signal.handle, lane)

    def query(self, signal: Signal) -> bool:
        self.wait(signal)
        return True

    def idle(self) -> None: ...

    def drain(self) -> None:
        if self._observer is not None:
            self._observer.process_drained()
