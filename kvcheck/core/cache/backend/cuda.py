"""The CUDA backend: a lane is a stream and a signal is an event; the device decides what runs when.

Invariants:
- The device is synchronised in `drain` only. A process's wait joins one event. If delays are imposed, every lane is
  released before the process waits.
- A graph is captured when it is first replayed. The device is not synchronised, so operations in flight stay in flight.
- An operation's closures, and so the tensors they hold, live until the operation is known to have run: the caching
  allocator never hands out memory that a queued kernel still touches.
- The observer learns of a completion when the process does (wait, query, drain, or a full list of pending operations).
  An operation is never shown before one that it waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from kvcheck.core.base.errors import DoubleFree, InternalError, UnknownVerdict
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import (
    POISON_BYTE,
    ChunkWork,
    Footprint,
    Graph,
    Lane,
    Operation,
    OperationObserver,
    Place,
    Signal,
)
from kvcheck.core.cache.backend.cuda_holds import CudaHolds
from kvcheck.core.cache.backend.delays import Delay, DelayReport
from kvcheck.core.cache.backend.graphs import Captures

STREAMS_MOST = 64
"""Streams of a priority that are asked for before the next priority is tried. torch has 32 of each, in turn."""

PENDING_MAX = 4096
"""Operations kept before the host must wait for the oldest: bounds the events and the tensors held alive."""


ORDINARY, URGENT = 0, -1
"""Priorities of streams. torch has a pool of streams for each."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """What a signal's handle is. `is_shared`: the list of pending operations holds the event too.

    number: of the record, for the observer.
    """

    event: torch.cuda.Event
    is_shared: bool
    number: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """kept: what must live until the operation has run: its closures, and the graph that it is part of."""

    ordinal: int
    event: torch.cuda.Event
    kept: tuple[object, ...]


def cuda_device(index: int) -> torch.device:
    """The device of that number. Raises UnknownVerdict where there is none."""
    if not torch.cuda.is_available():
        raise UnknownVerdict(
            f"backend cuda needs a CUDA device; torch {torch.__version__} sees none; see `kvcheck doctor`"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise UnknownVerdict(
            f"backend cuda has no device {index}; expected 0 to {torch.cuda.device_count() - 1}; see `kvcheck doctor`"
        )
    return torch.device("cuda", index)


class CudaBackend:
    """Streams and events of one device, used by one thread. delays: where lanes are held, see delays.py."""

    name = "cuda"

    def __init__(
        self, device_index: int = 0, observer: OperationObserver | None = None, delays: Sequence[Delay] = ()
    ) -> None:
        self.device = cuda_device(device_index)
        self._observer = observer
        self._lanes: dict[str, Lane] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._taken: set[int] = set()
        # Allocation, poison and index uploads have a stream of their own, so that they never queue behind a lane. It is
        # of the other pool of torch's: a pool begins again after 32 streams, and lanes are more than that.
        self._service = self._stream_of_its_own(URGENT)
        self._bytes: dict[str, int] = {}
        self._pending: list[deque[_Pending]] = []
        self._submitted = 0
        self._completed = 0
        self._records = 0
        self._captures = Captures()
        self.capture = self._captures.capture
        self._capturing = self._stream_of_its_own(URGENT)
        # By lane, the newest capture: its memory is shared with the next, so that captures allocate little.
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._holds = CudaHolds(delays, self.device, self._service) if delays else None

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(len(self._lanes), name)
            self._streams.append(self._stream_of_its_own())
            self._pending.append(deque())
        return self._lanes[name]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        """A poisoned tensor of that name; the fill has run when this returns."""
        if name in self._bytes:
            raise InternalError(f"memory {name!r} is allocated already; release it first")
        if place is Place.DEVICE:
            with torch.cuda.stream(self._service):
                tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
                tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
            self._service.synchronize()
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype, pin_memory=place is Place.PINNED)
            tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
        self._bytes[name] = tensor.numel() * tensor.element_size()
        return tensor

    def release(self, name: str) -> None:
        if name not in self._bytes:
            raise DoubleFree(f"memory {name!r} is not allocated; allocated: {', '.join(sorted(self._bytes)) or 'none'}")
        del self._bytes[name]

    def allocated(self) -> dict[str, int]:
        return dict(self._bytes)

    def index(self, values: IndexArray) -> torch.Tensor:
        """A copy of the ids on the device, uploaded when this returns."""
        with torch.cuda.stream(self._service):
            ids = torch.from_numpy(values.copy()).to(self.device)
        self._service.synchronize()
        return ids

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
        if self._observer is not None:
            self._observer.submitted(self._submitted, operation, lane, reads, writes, record)
        event = self._launch((operation.name,), lane, chunks)
        self._pending[lane.index].append(_Pending(self._submitted, event, chunks))
        if any(f.place is Place.PAGEABLE for f in writes):
            self._synchronize(event)
            self._collect()
            self._tell_joined(record)
        elif self._submitted - self._completed > PENDING_MAX:
            self._make_room()
        return Signal(_Recording(event, True, record))

    def replay(self, graph: Graph) -> None:
        """Launch the whole graph on its lane's stream. The first replay captures it first."""
        self._captures.check(graph)
        if not graph.operations:
            return
        if not isinstance(graph.handle, torch.cuda.CUDAGraph):
            graph.handle = self._capture(graph)
        first = self._submitted + 1
        for each in graph.operations:
            self._submitted += 1
            self._records += 1
            if self._observer is not None:
                self._observer.submitted(
                    self._submitted, each.operation, graph.lane, each.reads, each.writes, self._records
                )
        names = [each.operation.name for each in graph.operations]
        event = self._launch(names, graph.lane, (graph.handle.replay,))
        pending = self._pending[graph.lane.index]
        pending.extend(_Pending(ordinal, event, (graph,)) for ordinal in range(first, self._submitted + 1))
        if self._submitted - self._completed > PENDING_MAX:
            self._make_room()

    def record(self, signal: Signal, *, lane: Lane) -> None:
        """Record the signal's event behind everything queued in the lane.

        If the signal has an event, that event is recorded again; a stream that waits already keeps the recording it was
        given. The event that `submit` made is not recorded again, because it marks the end of that operation.
        """
        self._captures.refuse_record(lane)
        recording = _recording_of(signal)
        event = _new_event() if recording is None or recording.is_shared else recording.event
        self._records += 1
        signal.handle = _Recording(event, False, self._records)
        event.record(self._streams[lane.index])
        if self._observer is not None:
            self._observer.recorded(self._records, lane)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        """Make the process wait, or make the lane's stream wait, for the recording that the event holds now."""
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
        """Ask the event; a never-recorded signal counts as reached."""
        recording = _recording_of(signal)
        is_reached = recording is None or _has_run(recording.event)
        if self._holds is not None:
            self._holds.polled(is_reached)
        self._collect()
        if recording is not None and is_reached:
            self._tell_joined(recording.number)
        return is_reached

    def drain(self) -> None:
        self._give_way(lambda: False)
        torch.cuda.synchronize(self.device)
        self._collect()
        if self._observer is not None:
            self._observer.process_drained()

    def idle(self) -> None:
        """Find out which operations have run."""
        self._give_way(lambda: False)
        self._collect()

    def settle(self) -> DelayReport | None:
        """Wait for the device without calling the observer, before the backend is dropped. Returns the report of its
        delays."""
        self._give_way(lambda: False)
        torch.cuda.synchronize(self.device)
        return None if self._holds is None else self._holds.report()

    def _stream_of_its_own(self, *priorities: int) -> torch.cuda.Stream:
        """A stream that nothing else of this backend has: first of these priorities, then of any. Raises UnknownVerdict
        where torch has no more: lanes that share a stream are ordered, and a run would prove less than it says."""
        for priority in (*priorities, ORDINARY, URGENT):
            for _ in range(STREAMS_MOST):
                stream = _new_stream(self.device, priority)
                if stream.cuda_stream not in self._taken:
                    self._taken.add(stream.cuda_stream)
                    return stream
        raise UnknownVerdict(
            f"backend cuda needs a stream for each lane, and torch has no more than {len(self._taken)}; "
            "next: fewer ranks, such as --ranks 1x1"
        )

    def _launch(self, names: Sequence[str], lane: Lane, work: Sequence[ChunkWork]) -> torch.cuda.Event:
        """Run the closures with the lane's stream as the current one, after a hold if a delay asks for one."""
        stream, event = self._streams[lane.index], _new_event()
        if self._holds is not None:
            self._holds.before(names, lane, stream)
        with torch.cuda.stream(stream):
            for chunk in work:
                chunk()
            event.record(stream)
        if self._holds is not None:
            self._holds.behind(event)
        return event

    def _capture(self, graph: Graph) -> torch.cuda.CUDAGraph:
        """Capture the closures on a stream of its own.

        torch.cuda.graph is not used: it synchronises the device and empties the allocator's cache, so loads in flight
        would land and held lanes would be waited for. The mode is relaxed, because closures may load a kernel.
        """
        made, last = torch.cuda.CUDAGraph(), self._captured.get(graph.lane.index)
        with torch.cuda.stream(self._capturing):
            made.capture_begin(pool=None if last is None else last.pool(), capture_error_mode="relaxed")
            is_whole = False
            try:
                for each in graph.operations:
                    for chunk in each.operation.chunks:
                        chunk()
                is_whole = True
            finally:
                # The end of a capture that failed fails too, and says less than the first error.
                with nullcontext() if is_whole else suppress(RuntimeError):
                    made.capture_end()
        self._captured[graph.lane.index] = made
        return made

    def _synchronize(self, event: torch.cuda.Event) -> None:
        self._give_way(lambda: _has_run(event))
        event.synchronize()

    def _give_way(self, is_reached: Callable[[], bool]) -> None:
        if self._holds is not None:
            self._holds.give_way(is_reached)

    def _wait_on_lane(self, signal: Signal, lane: Lane) -> None:
        recording = _recording_of(signal)
        if recording is None or self._captures.covers(lane):
            return
        self._streams[lane.index].wait_event(recording.event)
        if self._observer is not None:
            self._observer.lane_waited(recording.number, lane)

    def _tell_joined(self, record: int) -> None:
        if self._observer is not None:
            self._observer.process_joined(record)

    def _make_room(self) -> None:
        self._collect()
        if self._submitted - self._completed > PENDING_MAX:
            oldest = min((queue[0] for queue in self._pending if queue), key=lambda pending: pending.ordinal)
            self._synchronize(oldest.event)
            self._collect()

    def _collect(self) -> None:
        """Report what has run since the last look.

        Streams are asked one by one, so an operation can be seen before one that it waited for. So all are asked until
        nothing changes, and then reported by ordinal.
        """
        done: list[int] = []
        moved = True
        while moved:
            moved = False
            for queue in self._pending:
                while queue and _has_run(queue[0].event):
                    done.append(queue.popleft().ordinal)
                    moved = True
        self._completed += len(done)
        if self._observer is not None:
            for ordinal in sorted(done):
                self._observer.completed(ordinal)


def _recording_of(signal: Signal) -> _Recording | None:
    if signal.handle is None or isinstance(signal.handle, _Recording):
        return signal.handle
    raise InternalError(f"expected a signal of backend cuda, got one that holds a {type(signal.handle).__name__}")


# torch leaves these three calls untyped; they are typed here once.


def _new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _has_run(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
