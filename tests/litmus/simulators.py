"""Every schedule of a simulated run, and simulators that break one rule each.

Invariants:
- `Explorer` takes each path through the choices once, in one order, and stops when there is none left.
- A mutant differs from the simulator in one rule and is otherwise the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from litmus.rig import Rig

from kvcheck.core.base.errors import Hang
from kvcheck.core.cache.backend.backend import Graph, Lane, Operation, Signal
from kvcheck.core.cache.backend.simulated import Choice, Goal, Pending, Record, SimulatedBackend, _Mark, _Wait


class Explorer:
    """A chooser that follows `path`, then takes the first way at each new fork and remembers how many there were."""

    def __init__(self, path: Sequence[int] = ()) -> None:
        self.path = list(path)
        self.ways: list[int] = []

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        """The way to go; where pausing is allowed, it is the last one."""
        depth = len(self.ways)
        self.ways.append(len(enabled) + may_pause)
        if depth == len(self.path):
            self.path.append(0)
        way = self.path[depth]
        return None if way == len(enabled) else way

    def next_path(self) -> list[int] | None:
        """The path after this one, depth first; None after the last."""
        for depth in reversed(range(len(self.ways))):
            if self.path[depth] + 1 < self.ways[depth]:
                return [*self.path[:depth], self.path[depth] + 1]
        return None


Program = Callable[[Rig], str]
Machine = type[SimulatedBackend]


def run_once(program: Program, chooser: Explorer, machine: Machine = SimulatedBackend) -> str:
    """The outcome under one chooser; a Hang is the outcome "hang"."""
    try:
        return program(Rig(machine(chooser), lambda _actor: None))
    except Hang:
        return "hang"


def explore(program: Program, machine: Machine = SimulatedBackend) -> dict[tuple[int, ...], str]:
    outcomes: dict[tuple[int, ...], str] = {}
    path: list[int] | None = []
    while path is not None:
        chooser = Explorer(path)
        outcome = run_once(program, chooser, machine)
        outcomes[tuple(chooser.path)] = outcome
        path = chooser.next_path()
    return outcomes


class LaneWithoutOrder(SimulatedBackend):
    """Any operation of a lane may run, up to the lane's first wait or mark."""

    def _enabled(self) -> list[Choice]:
        self._settle()
        enabled: list[Choice] = []
        for queue in self._queues:
            for item in queue:
                if not isinstance(item, Pending):
                    break
                enabled.extend((item, i) for i in range(len(item.chunks)))
        return enabled

    def _step(self, enabled: list[Choice], *, may_pause: bool, goal: Goal | None = None) -> bool:
        choice = self._chooser.choose(enabled, may_pause=may_pause, goal=goal)
        if choice is None:
            return False
        pending, index = enabled[choice]
        pending.chunks.pop(index)()
        if not pending.chunks:
            self._queues[pending.lane.index].remove(pending)
            pending.record.done = True
        return True


class _LateWait(_Wait):
    """A wait that looks at the signal when its turn comes."""

    __slots__ = ("_signal",)

    def __init__(self, signal: Signal) -> None:
        self._signal = signal

    @property
    def record(self) -> Record:  # type: ignore[override]
        assert isinstance(self._signal.handle, Record)
        return self._signal.handle


class WaitBindsLate(SimulatedBackend):
    """A lane's wait binds when it runs."""

    def _queue_wait(self, signal: Signal, lane: Lane) -> None:
        if isinstance(signal.handle, Record):
            self._queues[lane.index].append(_LateWait(signal))


class WaitBindsFirst(SimulatedBackend):
    """A signal keeps its first record."""

    def record(self, signal: Signal, *, lane: Lane) -> None:
        if signal.handle is None:
            super().record(signal, lane=lane)


class NeverRecordedBlocks(SimulatedBackend):
    """A lane that waits on a never-recorded signal waits for its first record."""

    def __init__(self, chooser: Explorer) -> None:
        super().__init__(chooser)
        self._promised: dict[Signal, Record] = {}

    def _queue_wait(self, signal: Signal, lane: Lane) -> None:
        if signal.handle is None:
            promised = self._promised.setdefault(signal, self._new_record(lane))
            self._queues[lane.index].append(_Wait(promised))
            return
        super()._queue_wait(signal, lane)

    def record(self, signal: Signal, *, lane: Lane) -> None:
        if promised := self._promised.pop(signal, None):
            self._queues[lane.index].append(_Mark(promised))
        super().record(signal, lane=lane)


class LaneWaitDropped(SimulatedBackend):
    """A lane never waits."""

    def _queue_wait(self, signal: Signal, lane: Lane) -> None:
        return


class HostWaitDropped(SimulatedBackend):
    """The host never waits."""

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        if lane is not None:
            super().wait(signal, lane=lane)


class QueryEarly(SimulatedBackend):
    """A query says True while work is pending."""

    def query(self, signal: Signal) -> bool:
        super().query(signal)
        return True


class _Resubmitting(SimulatedBackend):
    """Submits another operation in place of the one it is given."""

    def _instead(self, operation: Operation) -> Operation:
        return operation

    def submit(self, operation: Operation, **named: Any) -> Signal:
        return super().submit(self._instead(operation), **named)


class StageIgnored(_Resubmitting):
    """A copy from pageable memory reads it when it runs."""

    def _instead(self, operation: Operation) -> Operation:
        return Operation(operation.name, operation.chunks)


class PartsAreAtomic(_Resubmitting):
    """The chunks of an operation run as one, in order."""

    def _instead(self, operation: Operation) -> Operation:
        def run_all() -> None:
            for chunk in operation.chunks:
                chunk()

        return Operation(operation.name, (run_all,), stage=operation.stage)


class FirstPartCompletes(SimulatedBackend):
    """An operation's signal is reached when its first chunk has run; the others follow in the same lane."""

    def submit(self, operation: Operation, **named: Any) -> Signal:
        first, *rest = (Operation(operation.name, (chunk,)) for chunk in operation.chunks)
        signal = super().submit(first, **named)
        for chunk in rest:
            super().submit(chunk, **{**named, "after": ()})
        return signal


class RunsAtOnce(SimulatedBackend):
    """Submitting an operation runs everything that is queued, as if no copy were asynchronous."""

    def _yield(self) -> None:
        self.drain()


class CaptureRuns(SimulatedBackend):
    """What is submitted inside a capture runs, and a replay does nothing more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capture = lambda lane: nullcontext(Graph(lane))

    def replay(self, graph: Graph) -> None:
        pass
