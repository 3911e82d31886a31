"""The backend of a machine with streams: a lane is a stream, a signal is an event.

Invariants:
- Only `drain` synchronises the device. With delays, every lane is released before the process waits, also before an
  operation whose chunks make it wait.
- An operation's closures, and so their tensors, live until it is known to have run: an allocator never hands out memory
  that a queued operation still touches.
- A completion is emitted when the process detects it, and never before that of an operation that it waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from kvcheck.core.base.errors import DoubleFree, InternalError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import (
    Completed,
    Footprint,
    Graph,
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
from kvcheck.core.cache.backend.delays import Delay, DelayReport
from kvcheck.core.cache.backend.device import Event, Stream, StreamDevice
from kvcheck.core.cache.backend.graphs import Captures
from kvcheck.core.cache.backend.holds import Holds
from kvcheck.core.cache.events import Emit

PENDING_MAX = 4096
"""Operations kept before the host must wait for the oldest: bounds the events and the tensors held alive."""

IDLE_MOST_S, IDLE_LOOK_S = 0.25, 0.00005
"""Longest wait of an idle process for the next operation to have run, and the interval of its checks."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """A signal's handle. is_shared: the list of pending operations holds the event too."""

    event: Any
    is_shared: bool
    number: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """kept: objects that must live until the operation has run: its closures, or its graph."""

    ordinal: int
    event: Any
    kept: tuple[object, ...]


class StreamedBackend(Generic[Stream, Event]):
    """Streams and events of one device, used by one thread."""

    name: str

    def __init__(
        self,
        machine: StreamDevice[Stream, Event],
        emit: Emit | None = None,
        delays: Sequence[Delay] = (),
    ) -> None:
        self.device = machine.device
        self._machine = machine
        self._emit = emit
        self._lanes: dict[str, Lane] = {}
        self._streams: list[Stream] = []
        self._bytes: dict[str, int] = {}
        self._pending: list[deque[_Pending]] = []
        self._submitted = 0
        self._completed = 0
        self._records = 0
        self._captures = Captures()
        self.capture = self._captures.capture
        # By lane, the newest capture: its memory is shared with the next, so that captures allocate little.
        self._captured: dict[int, object] = {}
        self._holds = Holds(delays, machine) if delays else None

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(len(self._lanes), name)
            self._streams.append(self._stream_for(name))
            self._pending.append(deque())
        return self._lanes[name]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        if name in self._bytes:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        tensor = self._machine.empty(shape, dtype, place)
        self._bytes[name] = tensor.numel() * tensor.element_size()
        return tensor

    def release(self, name: str) -> None:
        if name not in self._bytes:
            raise DoubleFree(f"memory {name!r} is not allocated; allocated: {', '.join(sorted(self._bytes)) or 'none'}")
        del self._bytes[name]

    def allocated(self) -> dict[str, int]:
        return dict(self._bytes)

    def index(self, values: IndexArray) -> torch.Tensor:
        return self._machine.upload(values)

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
        for signal in after:
            self._wait_on_lane(signal, lane)
        self._submitted += 1
        self._records += 1
        record = self._records
        chunks = operation.chunks
        if operation.stage is not None and any(f.place is Place.PAGEABLE for f in reads):
            chunks = operation.stage()
        if self._emit is not None:
            self._emit(Submitted.of(self._submitted, operation, lane, reads, writes, record))
        is_pageable = any(f.place is Place.PAGEABLE for f in writes)
        event = self._launch(
            (operation.name,),
            lane,
            lambda stream: self._machine.run(stream, chunks, operation.name),
            joins_host=operation.joins_host or is_pageable,
        )
        self._pending[lane.index].append(_Pending(self._submitted, event, chunks))
        if is_pageable:
            self._synchronize(event)
            self._collect()
            self._tell_joined(record)
        elif self._submitted - self._completed > PENDING_MAX:
            self._make_room()
        return Signal(_Recording(event, True, record))

    def replay(self, graph: Graph) -> None:
        """Launch the graph on its lane's stream. The first replay captures it, without synchronising the device."""
        self._captures.check(graph)
        if not graph.operations:
            return
        if graph.handle is None:
            graph.handle = self._capture(graph)
        first = self._submitted + 1
        for each in graph.operations:
            self._submitted += 1
            self._records += 1
            if self._emit is not None:
                self._emit(
                    Submitted.of(self._submitted, each.operation, graph.lane, each.reads, each.writes, self._records)
                )
        names = [each.operation.name for each in graph.operations]
        event = self._launch(names, graph.lane, lambda stream: self._machine.replay(stream, graph.handle))
        pending = self._pending[graph.lane.index]
        pending.extend(_Pending(ordinal, event, (graph,)) for ordinal in range(first, self._submitted + 1))
        if self._submitted - self._completed > PENDING_MAX:
            self._make_room()

    def record(self, signal: Signal, *, lane: Lane) -> None:
        """Record behind everything in the lane. An event of `submit` is replaced: it marks that operation's end."""
        self._captures.refuse_record(lane)
        recording = _recording_of(signal)
        event = self._machine.event() if recording is None or recording.is_shared else recording.event
        self._records += 1
        signal.handle = _Recording(event, False, self._records)
        self._machine.record(event, self._streams[lane.index])
        if self._emit is not None:
            self._emit(Recorded(self._records, lane.name))

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if lane is not None:
            self._wait_on_lane(signal, lane)
            return
        recording = _recording_of(signal)
        if recording is not None:
            self._synchronize(recording.event)
        self._collect()
        if recording is not None:
            self._tell_joined(recording.number)

    def query(self, signal: Signal) -> bool:
        recording = _recording_of(signal)
        is_reached = recording is None or self._machine.has_run(recording.event)
        if self._holds is not None:
            self._holds.polled(is_reached)
        self._collect()
        if recording is not None and is_reached:
            self._tell_joined(recording.number)
        return is_reached

    def drain(self) -> None:
        self._give_way(lambda: False)
        self._machine.synchronize()
        self._collect()
        if self._emit is not None:
            self._emit(ProcessDrained())

    def idle(self) -> None:
        """Wait until some operation has run, for IDLE_MOST_S at most."""
        before = self._completed

        def has_moved() -> bool:
            self._collect()
            return self._completed > before

        self._give_way(has_moved)
        until = time.monotonic() + IDLE_MOST_S
        while not has_moved() and self._completed < self._submitted and time.monotonic() < until:
            time.sleep(IDLE_LOOK_S)

    def settle(self) -> DelayReport | None:
        """Wait for the device without emitting events, and return the report of its delays. Raise an error of the
        device that was not raised before."""
        try:
            self._give_way(lambda: False)
            self._machine.synchronize()
            return None if self._holds is None else self._holds.report()
        finally:
            self._machine.close()

    def is_lost(self) -> bool:
        """True if nothing runs on the device any more in this process. Valid after `settle`."""
        return self._machine.is_lost()

    def _stream_for(self, name: str) -> Stream:
        return self._machine.stream()

    def _launch(
        self, names: Sequence[str], lane: Lane, launch: Callable[[Stream], None], *, joins_host: bool = False
    ) -> Event:
        """Queue work on the lane's stream, after a hold if a delay requires one. Return the event of its end."""
        stream, event = self._streams[lane.index], self._machine.event()
        if self._holds is not None:
            self._holds.before(names, lane, stream)
            if joins_host:
                self._give_way(lambda: False)
        launch(stream)
        self._machine.record(event, stream)
        if self._holds is not None:
            self._holds.behind(event)
        return event

    def _capture(self, graph: Graph) -> object:
        work = [chunk for each in graph.operations for chunk in each.operation.chunks]
        made = self._machine.capture(work, self._captured.get(graph.lane.index))
        self._captured[graph.lane.index] = made
        return made

    def _synchronize(self, event: Event) -> None:
        self._give_way(lambda: self._machine.has_run(event))
        self._machine.join(event)

    def _give_way(self, is_reached: Callable[[], bool]) -> None:
        if self._holds is not None:
            self._holds.give_way(is_reached)

    def _wait_on_lane(self, signal: Signal, lane: Lane) -> None:
        recording = _recording_of(signal)
        if recording is None or self._captures.covers(lane):
            return
        self._machine.wait(self._streams[lane.index], recording.event)
        if self._emit is not None:
            self._emit(LaneWaited(recording.number, lane.name))

    def _tell_joined(self, record: int) -> None:
        if self._emit is not None:
            self._emit(ProcessJoined(record))

    def _make_room(self) -> None:
        self._collect()
        if self._submitted - self._completed > PENDING_MAX:
            oldest = min((queue[0] for queue in self._pending if queue), key=lambda pending: pending.ordinal)
            self._synchronize(oldest.event)
            self._collect()

    def _collect(self) -> None:
        # Streams are queried one by one, so an operation can be seen before one that it waited for. So all are queried
        # until nothing changes, and then reported by ordinal.
        done: list[int] = []
        moved = True
        while moved:
            moved = False
            for queue in self._pending:
                while queue and self._machine.has_run(queue[0].event):
                    done.append(queue.popleft().ordinal)
                    moved = True
        self._completed += len(done)
        if self._emit is not None:
            for ordinal in sorted(done):
                self._emit(Completed(ordinal))


def _recording_of(signal: Signal) -> _Recording | None:
    if signal.handle is None or isinstance(signal.handle, _Recording):
        return signal.handle
    raise InternalError(f"expected a signal of a device, got one that holds a {type(signal.handle).__name__}")
