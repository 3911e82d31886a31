"""The simulated backend: operations wait in lanes until a chooser picks the next chunk to run.

Invariants:
- The same choices give the same run on any machine.
- Only the first operation of a lane can run. Its chunks run in any order. Lanes interleave freely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from kvcheck.core.base.errors import Hang, InternalError
from kvcheck.core.cache.backend.backend import (
    ChunkWork,
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


class Chooser(Protocol):
    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        """Return the index of the chunk to run, or None to let the process go on (only if `may_pause`)."""


class Record:
    """One recording of a signal. number: for observers. queue: of its lane."""

    __slots__ = ("done", "number", "queue")

    def __init__(self, number: int, queue: Queue) -> None:
        self.number = number
        self.queue = queue
        self.done = False


class Goal:
    """The process's reason to let time pass: the record that it queries or waits for, if any.

    query: its number in the run, from 0, or None. A query without a record only gives other lanes their turn.
    """

    __slots__ = ("_lanes", "query", "record")

    def __init__(self, record: Record | None, query: int | None, lanes: Lanes) -> None:
        self.record = record
        self.query = query
        self._lanes = lanes

    def next(self, record: Record | None = None) -> Pending | None:
        """The operation to run next before `record` (default: the goal's) is reached; None if there is none."""
        wanted, met = record or self.record, set[int]()
        while wanted is not None and not wanted.done and wanted.number not in met:
            met.add(wanted.number)
            head = next((each for each in wanted.queue if type(each) is not _Mark), None)
            if type(head) is Pending:
                return head
            wanted = None if head is None else head.record
        return None

    def firsts(self, ends: tuple[str, ...]) -> list[Pending]:
        """The first operation, blocked or not, of each lane whose name ends so."""
        firsts = []
        for queue in self._lanes.ending(ends):
            for each in queue:
                if type(each) is Pending:
                    firsts.append(each)
                    break
        return firsts


class Pending:
    __slots__ = ("chunks", "lane", "operation", "ordinal", "record")

    def __init__(
        self, ordinal: int, operation: Operation, lane: Lane, chunks: tuple[ChunkWork, ...], record: Record
    ) -> None:
        self.ordinal = ordinal
        self.operation = operation
        self.lane = lane
        self.chunks = list(chunks)
        self.record = record


class _Wait:
    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record


class _Mark:
    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record


Queue = deque["Pending | _Wait | _Mark"]


class Lanes:
    def __init__(self) -> None:
        self.queues: list[Queue] = []
        self._names: list[str] = []
        self._ending: dict[tuple[str, ...], list[Queue]] = {}

    def add(self, name: str) -> None:
        self._names.append(name)
        self.queues.append(deque())
        self._ending.clear()

    def ending(self, ends: tuple[str, ...]) -> list[Queue]:
        if ends not in self._ending:
            named = zip(self._names, self.queues, strict=True)
            self._ending[ends] = [queue for name, queue in named if name.endswith(ends)]
        return self._ending[ends]


Choice = tuple[Pending, int]
"""An enabled chunk: the pending operation at the head of its lane, and the index of one of its chunks."""


class SimulatedBackend(HostMemory):
    """A run of more than `max_steps` virtual steps raises Hang. refused: numbers of the queries that returned False."""

    name = "simulated"
    device = torch.device("cpu")

    def __init__(self, chooser: Chooser, emit: Emit | None = None, max_steps: int = 50_000_000) -> None:
        super().__init__()
        self._chooser = chooser
        self._emit = emit
        self._lanes: dict[str, Lane] = {}
        self._captures = Captures()
        self.capture = self._captures.capture
        self._machine = Lanes()
        self._queues = self._machine.queues
        self._queries = 0
        self._no_goal = Goal(None, None, self._machine)
        self._submitted = 0
        self._records = 0
        self._max_steps = max_steps
        self.steps = 0
        self.refused: list[int] = []

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(len(self._lanes), name)
            self._machine.add(name)
        return self._lanes[name]

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
            self._queue_wait(signal, lane)
        self._submitted += 1
        chunks = operation.chunks
        if operation.stage is not None and any(f.place is Place.PAGEABLE for f in reads):
            chunks = operation.stage()
        if not chunks:
            # An empty copy has one empty chunk. Without any chunk it would block its lane for ever.
            chunks = (_nothing,)
        pending = Pending(self._submitted, operation, lane, chunks, self._new_record(lane))
        self._queues[lane.index].append(pending)
        if self._emit is not None:
            self._emit(Submitted.of(pending.ordinal, operation, lane, reads, writes, pending.record.number))
        if any(f.place is Place.PAGEABLE for f in writes):
            self._run_until(pending.record, operation.name)
            self._tell_joined(pending.record)
        # Other lanes go on while the process returns, also from a copy that it had to wait for.
        self._yield()
        return Signal(pending.record)

    def record(self, signal: Signal, *, lane: Lane) -> None:
        self._captures.refuse_record(lane)
        record = self._new_record(lane)
        signal.handle = record
        self._queues[lane.index].append(_Mark(record))
        if self._emit is not None:
            self._emit(Recorded(record.number, lane.name))
        self._yield()

    def replay(self, graph: Graph) -> None:
        self._captures.check(graph)
        for each in graph.operations:
            self.submit(each.operation, lane=graph.lane, reads=each.reads, writes=each.writes)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if lane is not None:
            self._queue_wait(signal, lane)
            self._yield()
            return
        if isinstance(signal.handle, Record):
            self._run_until(signal.handle, "host wait")
            self._tell_joined(signal.handle)

    def query(self, signal: Signal) -> bool:
        handle = signal.handle
        self._yield(Goal(handle if isinstance(handle, Record) else None, self._queries, self._machine))
        self._queries += 1
        self._settle()
        if not isinstance(signal.handle, Record):
            return True
        if signal.handle.done:
            self._tell_joined(signal.handle)
            return True
        self.refused.append(self._queries - 1)
        # A poll takes a step, so that a process that polls for ever is a Hang and not an endless run.
        self._spend_step()
        return False

    def drain(self) -> None:
        while enabled := self._enabled():
            self._step(enabled, may_pause=False)
        stuck = [name for name, lane in self._lanes.items() if self._queues[lane.index]]
        if stuck:
            raise Hang(f"drain: lanes {', '.join(stuck)} wait for signals that nothing pending records")
        if self._emit is not None:
            self._emit(ProcessDrained())

    def idle(self) -> None:
        if enabled := self._enabled():
            self._step(enabled, may_pause=False)
        self._spend_step()

    def _queue_wait(self, signal: Signal, lane: Lane) -> None:
        if not isinstance(signal.handle, Record) or self._captures.covers(lane):
            return
        if self._emit is not None:  # also if the record is reached: in another schedule it is not
            self._emit(LaneWaited(signal.handle.number, lane.name))
        if not signal.handle.done:
            self._queues[lane.index].append(_Wait(signal.handle))

    def _new_record(self, lane: Lane) -> Record:
        self._records += 1
        return Record(self._records, self._queues[lane.index])

    def _tell_joined(self, record: Record) -> None:
        if self._emit is not None:
            self._emit(ProcessJoined(record.number))

    def _run_until(self, record: Record, what: str) -> None:
        self._settle()
        goal = Goal(record, None, self._machine)
        while not record.done:
            enabled = self._enabled()
            if not enabled:
                raise Hang(f"{what}: no pending operation can satisfy this wait")
            self._step(enabled, may_pause=False, goal=goal)
            self._settle()

    def _yield(self, goal: Goal | None = None) -> None:
        goal = goal or self._no_goal
        while (enabled := self._enabled()) and self._step(enabled, may_pause=True, goal=goal):
            pass

    def _settle(self) -> None:
        """Pass marks and satisfied waits at the heads of all lanes, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for queue in self._queues:
                while queue:
                    head = queue[0]
                    if type(head) is _Mark:
                        head.record.done = True
                    elif type(head) is Pending or not head.record.done:
                        break
                    queue.popleft()
                    moved = True

    def _enabled(self) -> list[Choice]:
        self._settle()
        enabled: list[Choice] = []
        for queue in self._queues:
            if queue and type(head := queue[0]) is Pending:
                enabled.extend([(head, at) for at in range(len(head.chunks))])
        return enabled

    def _step(self, enabled: list[Choice], *, may_pause: bool, goal: Goal | None = None) -> bool:
        choice = self._chooser.choose(enabled, may_pause=may_pause, goal=goal)
        if choice is None:
            if not may_pause:
                raise InternalError(
                    f"chooser paused where the process waits; expected 0 to {len(enabled) - 1}, got None"
                )
            return False
        self._spend_step()
        pending, index = enabled[choice]
        pending.chunks.pop(index)()
        if not pending.chunks:
            self._queues[pending.lane.index].popleft()
            pending.record.done = True
            if self._emit is not None:
                self._emit(Completed(pending.ordinal))
        return True

    def _spend_step(self) -> None:
        self.steps += 1
        if self.steps > self._max_steps:
            raise Hang(f"step budget of {self._max_steps} virtual steps is spent; the run does not end")


def _nothing() -> None: ...
