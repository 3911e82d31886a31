"""History: the events of one schedule, for oracles that judge while it runs or from a stored list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation
from kvcheck.core.stress.workload.events import (
    Completed,
    Emit,
    Event,
    LaneWaited,
    ProcessDrained,
    ProcessJoined,
    Recorded,
    Submitted,
)

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


class OperationEvents:
    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def submitted(
        self,
        ordinal: int,
        operation: Operation,
        lane: Lane,
        reads: Iterable[Footprint],
        writes: Iterable[Footprint],
        record: int,
    ) -> None:
        self._emit(
            Submitted(ordinal, operation.name, lane.name, tuple(reads), tuple(writes), record, operation.request)
        )

    def recorded(self, record: int, lane: Lane) -> None:
        self._emit(Recorded(record, lane.name))

    def lane_waited(self, record: int, lane: Lane) -> None:
        self._emit(LaneWaited(record, lane.name))

    def process_joined(self, record: int) -> None:
        self._emit(ProcessJoined(record))

    def process_drained(self) -> None:
        self._emit(ProcessDrained())

    def completed(self, ordinal: int) -> None:
        self._emit(Completed(ordinal))
