"""Stand-in streams: side streams, events and synchronisation for an engine on a machine without a device.

The engine's own work is the main stream and runs at once, as on any CPU. Work on a side stream runs when the engine
waits for it, or earlier if the schedule decides so. A missing wait shows in the values read.

Invariants:
- Equal seeds and equal calls give equal orders.
- A wait binds to the latest record of its event. A wait for an event that was never recorded does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.rng import Rng

__tracebackhide__ = True

EAGER, LAZY, RANDOM = "eager", "lazy", "random"
ORDERS = (LAZY, RANDOM, EAGER)
"""When queued work runs: at the first wait (lazy), at moments drawn from the seed (random), or at once (eager)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReport:
    """How work was held on a real device. It is empty for stand-in streams, which need no holds.

    placed: holds with a flag, of which the watchdog ended `fired` and the process the others. spun: holds of a fixed
    number of cycles; why_spin: why they have no flag. lacking: pieces of work without a hold, since all were in use.
    """

    placed: int = 0
    fired: int = 0
    spun: int = 0
    lacking: int = 0
    why_spin: str = ""

    def plus(self, other: HoldReport) -> HoldReport:
        return HoldReport(
            placed=self.placed + other.placed,
            fired=self.fired + other.fired,
            spun=self.spun + other.spun,
            lacking=self.lacking + other.lacking,
            why_spin=self.why_spin or other.why_spin,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return (*(["work is held until the process lets it go"] if self.placed else []), *self.limits)

    @property
    def limits(self) -> tuple[str, ...]:
        told = [f"work is held by a kernel that spins for a fixed time: {self.why_spin}"] if self.spun else []
        if self.fired:
            told.append(f"{self._ended}; these imposed no order")
        if self.lacking:
            told.append(f"not exercised: {counted(self.lacking, 'delay')}, as all holds were in use")
        return tuple(told)

    @property
    def gap(self) -> str | None:
        if not self.placed or self.fired < self.placed:
            return None
        return f"not exercised: {self._ended}, so no order was imposed"

    @property
    def _ended(self) -> str:
        return f"the watchdog of the device ended {self.fired} of {counted(self.placed, 'hold')}"


class Machine:
    fired = 0

    def __init__(self) -> None:
        self.reset(EAGER, 0)

    def reset(self, order: str, seed: int) -> None:
        self._order = order
        self._mix = Rng(seed)
        self._side: list[SideStream] = []
        self.main = SideStream(machine=self)
        self.main.is_main = True
        self._side.clear()
        self.current = self.main
        self.synchronisations = 0
        self.waits = 0
        self.queued = 0

    def add(self, stream: SideStream) -> None:
        self._side.append(stream)

    def side(self) -> SideStream:
        return SideStream(machine=self)

    def queue(self, work: Callable[[], None], *, goes_last: bool = False) -> None:
        self.queued += 1
        self.current.put(work)
        self.tick()

    def tick(self) -> None:
        busy = [stream for stream in self._side if stream.pending]
        if self._order == LAZY or not busy:
            return
        if self._order == EAGER:
            self.settle()
        elif self._mix.chance(1, 2):
            busy[self._mix.below(len(busy))].advance()

    def settle(self) -> None:
        for stream in self._side:
            stream.reach(stream.put_count)

    def taken(self, read: Sequence[torch.Tensor], *, rest_stays: bool = False) -> Sequence[torch.Tensor]:
        return read

    def has_reached(self, is_reached: Callable[[], bool]) -> bool:
        return is_reached()

    def let_go_until(self, is_reached: Callable[[], bool], *, on: SideStream | None = None) -> None:
        """Do nothing: a process that waits runs the work that it waits for."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield

    def take_report(self) -> HoldReport:
        return HoldReport()

    def synchronize(self, *_: object) -> None:
        self.synchronisations += 1
        self.settle()

    @contextmanager
    def on(self, stream: SideStream | None) -> Iterator[SideStream]:
        before, self.current = self.current, self.main if stream is None else stream
        try:
            yield self.current
        finally:
            self.current = before


class SideStream:
    machine: ClassVar[Machine]
    is_main = False

    def __init__(self, *_: object, machine: Machine | None = None, **__: object) -> None:
        self._machine = machine or type(self).machine
        self._queue: deque[Callable[[], None]] = deque()
        self.put_count = 0
        self._done_count = 0
        self._machine.add(self)

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def put(self, work: Callable[[], None]) -> None:
        self.put_count += 1
        if self.is_main:
            self._done_count += 1
            work()
        else:
            self._queue.append(work)

    def advance(self) -> None:
        if self._queue:
            work = self._queue.popleft()
            self._done_count += 1
            work()

    def reach(self, count: int) -> None:
        while self._queue and self._done_count < count:
            self.advance()

    def has_done(self, count: int) -> bool:
        return self._done_count >= count

    # Methods that an engine calls

    def wait_event(self, event: SideEvent) -> None:
        self._machine.waits += 1
        self.put(event.mark())

    def wait_stream(self, stream: SideStream) -> None:
        self._machine.waits += 1
        count = stream.put_count
        self.put(lambda: stream.reach(count))

    def record_event(self, event: SideEvent | None = None) -> SideEvent:
        made = event or SideEvent()
        made.record(self)
        return made

    def synchronize(self) -> None:
        self._machine.synchronisations += 1
        self.reach(self.put_count)

    def query(self) -> bool:
        self._machine.tick()
        return not self._queue

    def __enter__(self) -> SideStream:
        self._before = self._machine.current
        self._machine.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.current = self._before


class SideEvent:
    machine: ClassVar[Machine]

    def __init__(self, *_: object, **__: object) -> None:
        self._record: tuple[SideStream, int] | None = None

    def mark(self) -> Callable[[], None]:
        record = self._record
        return lambda: record[0].reach(record[1]) if record is not None else None

    def record(self, stream: SideStream | None = None) -> None:
        behind = stream or type(self).machine.current
        self._record = (behind, behind.put_count)
        type(self).machine.tick()

    def wait(self, stream: SideStream | None = None) -> None:
        (stream or type(self).machine.current).wait_event(self)

    def synchronize(self) -> None:
        type(self).machine.synchronisations += 1
        self.mark()()

    def query(self) -> bool:
        type(self).machine.tick()
        return self._record is None or self._record[0].has_done(self._record[1])

    def elapsed_time(self, _: object) -> float:
        return 0.0


def install() -> Machine:
    """Replace torch's streams by stand-ins, in this process and for good."""
    machine = Machine()
    SideStream.machine = SideEvent.machine = machine
    for module in (torch.cuda, torch.cpu):
        for name, stand_in in stand_ins(machine, SideStream, SideEvent).items():
            setattr(module, name, stand_in)
    return machine


def stand_ins(machine: Machine, stream: type[SideStream], event: type[SideEvent]) -> dict[str, Any]:
    return {
        "Stream": stream,
        "Event": event,
        "ExternalStream": stream,
        "StreamContext": machine.on,
        "stream": machine.on,
        "current_stream": lambda *_: machine.current,
        "default_stream": lambda *_: machine.main,
        "set_stream": lambda chosen: setattr(machine, "current", chosen),
        "synchronize": machine.synchronize,
    }
