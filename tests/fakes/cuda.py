"""A stand-in for torch.cuda on the CPU: streams are queues, and a seeded die says how far each has run.

What is called under `torch.cuda.stream(s)` joins the queue of s, where it was wrapped by `deferred`; all else of the
CUDA backend runs as it is. The host waits for the chunks of an operation that joins it. A hold is an entry that stays
at the head of its queue until its flag is raised or its watchdog fires, which it does when nothing else can move and
the host waits.

A chunk that raises what an index out of range raises does not raise it where it runs: as on a device, its context is
lost, and every later call raises the same error.

Invariants:
- One thread, no clock: a seed gives the same run again.
- Nothing of torch is changed outside `installed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvcheck.core.base import cuda_hold
from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.backend import cuda, holds, streamed
from kvcheck.core.cache.backend.backend import ChunkWork, Operation, Signal
from kvcheck.core.probes.frame import cuda_streams
from kvcheck.core.stress import runner

Entry = Callable[[], bool]
"""Whether it has run; one that has not stays at the head of its queue."""


LOST = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported at some other API call"
"""What torch says of a context in which an index was out of range, at every call."""
POOL = 32
"""Streams of a priority that torch has: c10/cuda/CUDAStream.cpp."""


class Machine:
    """All streams of the device. ordinary: the one of a process that has chosen none. chunks_left: with the last of so
    many an id is out of range; 0: with none.
    """

    def __init__(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self.current: Stream | None = None
        self.syncs = 0
        self._looks = 0
        self.backend: type[Backend] = type("MachineBackend", (Backend,), {"machine": self})
        self.has_stalled = False
        self.due: list[Callable[[], object]] = []
        self.lost: str | None = None
        self.chunks_left = 0
        # Classes, as torch's are: whoever changes a method of them changes what all streams do.
        self.stream_kind: type[Stream] = _FromPool("MachineStream", (Stream,), {"pool_of": self})
        self.event_kind: type[Event] = type("MachineEvent", (Event,), {"of": self})
        self.fires = 0
        self.ordinary = self._new_stream()
        self._mix = Rng(seed)
        self._pools: dict[int, list[Stream]] = {}
        self._handed: dict[int, int] = {}

    def stream_of_pool(self, device: object = None, priority: int = 0) -> Stream:
        """As torch: of each priority there are 32, handed out in turn."""
        pool, number = self._pools.setdefault(priority, []), self._handed.get(priority, 0)
        self._handed[priority] = number + 1
        if len(pool) < POOL:
            pool.append(self._new_stream())
        return pool[number % POOL]

    def _new_stream(self) -> Stream:
        made: Stream = type.__call__(self.stream_kind, self)
        return made

    def looks(self) -> int:
        self._looks += 1
        return self._looks

    def check(self) -> None:
        """What every call does first: a lost context raises its old error."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def jitter(self) -> None:
        """The device goes on by a few steps."""
        for _ in range((0, 0, 1, 3, 9)[self._mix.below(5)]):
            self.step()

    def step(self) -> bool:
        """The head of one queue runs, if any can. Nothing runs in a lost context."""
        if self.lost is not None:
            for stream in self.streams:
                stream.queue.clear()
        busy = [stream for stream in self.streams if stream.queue]
        for _ in range(len(busy)):
            stream = busy.pop(self._mix.below(len(busy)))
            if stream.queue[0]():
                stream.queue.pop(0)
                return True
        return False

    def until(self, is_reached: Callable[[], bool]) -> None:
        """The host waits: where nothing can move, timers run out; then watchdogs fire; then it is a deadlock."""
        while not is_reached():
            self.check()
            if not self.step():
                if self.due:
                    self.due.pop(0)()
                    continue
                self.has_stalled = True
                moved = self.step()
                self.has_stalled = False
                assert moved, "deadlock"
        self.check()

    def synchronize(self, device: object = None) -> None:
        self.syncs += 1
        self.until(lambda: not any(stream.queue for stream in self.streams))


class _FromPool(type):
    """A class of streams that hands out those of its machine's pools."""

    pool_of: Machine

    def __call__(cls, device: object = None, priority: int = 0) -> Stream:
        return cls.pool_of.stream_of_pool(device, priority)


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue: list[Entry] = []
        self.graph: Graph | None = None
        machine.streams.append(self)
        self.cuda_stream = len(machine.streams)

    def call(self, work: Callable[[], object]) -> None:
        self.machine.check()
        (self.queue if self.graph is None else self.graph.entries).append(lambda: self._runs(work))
        self.machine.jitter()

    def _runs(self, work: Callable[[], object]) -> bool:
        try:
            self.machine.chunks_left -= 1
            if self.machine.chunks_left == 0:
                raise IndexError("out of range, as a test has asked for")
            work()
        except IndexError:
            self.machine.lost = LOST
        return True

    def synchronize(self) -> None:
        self.machine.until(lambda: not self.queue)

    def query(self) -> bool:
        self.machine.jitter()
        return not self.queue

    def wait_event(self, event: Event) -> None:
        self.machine.check()
        assert self.graph is None, "a capture that waits for the outside is invalid"
        reached = event.reached
        self.queue.append(lambda: reached[0])

    def wait_stream(self, stream: Stream) -> None:
        event = self.machine.event_kind()
        event.record(stream)
        self.wait_event(event)


class Event:
    of: ClassVar[Machine]

    def __init__(self, enable_timing: bool = False) -> None:
        self.machine = self.of
        self.reached = [True]

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current or self.machine.ordinary
        assert stream.graph is None
        self.reached = reached = [False]
        stream.call(lambda: reached.__setitem__(0, True))

    def query(self) -> bool:
        self.machine.jitter()
        self.machine.check()
        return self.reached[0]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.current or self.machine.ordinary).wait_event(self)

    def synchronize(self) -> None:
        self.machine.until(lambda: self.reached[0])


class Timer:
    """threading.Timer, which runs out when the host waits and nothing can move."""

    of: ClassVar[Machine]

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._call = call

    def start(self) -> None:
        self.of.due.append(self._call)

    def cancel(self) -> None:
        if self._call in self.of.due:
            self.of.due.remove(self._call)

    def join(self) -> None:
        """It has run, or never will."""


class Graph:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.entries: list[Entry] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed") and self.machine.current is not None
        assert self.machine.current.graph is None and not self.machine.current.queue
        self.machine.current.graph = self

    def capture_end(self) -> None:
        assert self.machine.current is not None and self.machine.current.graph is self and self.entries
        self.machine.current.graph = None

    def replay(self) -> None:
        assert self.machine.current is not None and self.machine.current.graph is None
        self.machine.current.queue += self.entries

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class Backend(cuda.CudaBackend):
    """The CUDA backend, whose chunks join the queue of the stream they are called on."""

    machine: ClassVar[Machine]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = self._machine.device = torch.device("cpu")

    def submit(self, operation: Operation, **kwargs: Any) -> Signal:
        stage, joins = operation.stage, operation.joins_host
        staged = None if stage is None else lambda: self._deferred(stage(), joins)
        chunks = self._deferred(operation.chunks, joins)
        return super().submit(replace(operation, chunks=chunks, stage=staged), **kwargs)

    def _deferred(self, chunks: Sequence[ChunkWork], joins: bool) -> tuple[ChunkWork, ...]:
        def deferred(chunk: ChunkWork) -> ChunkWork:
            def call() -> None:
                assert self.machine.current is not None
                self.machine.current.call(chunk)
                if joins:
                    self.machine.current.synchronize()

            return call

        return tuple(map(deferred, chunks))


@contextmanager
def installed(seed: int) -> Iterator[Machine]:
    """torch.cuda is a machine of that seed inside the block."""
    machine = Machine(seed)

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        last, machine.current = machine.current, stream
        try:
            yield
        finally:
            machine.current = last

    class CapturedGraph(Graph):
        def __init__(self) -> None:
            super().__init__(machine)

    def hold(flag: torch.Tensor, outcome: torch.Tensor, *, until: int, looks: int, limit_ns: int | None = None) -> None:
        assert machine.current is not None and looks > 0 and limit_ns

        def entry() -> bool:
            is_raised = int(flag) >= until
            if is_raised or machine.has_stalled:
                machine.fires += not is_raised
                machine.has_stalled = False
                outcome[0] = int(is_raised)
            return bool(is_raised or int(outcome[0]) == 0)

        outcome[0] = -1
        machine.current.queue.append(entry)

    allocate, zeros = torch.empty, torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "Stream", machine.stream_kind)
        patch.setattr(torch.cuda, "Event", machine.event_kind)
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        patch.setattr(torch.cuda, "CUDAGraph", CapturedGraph)
        patch.setattr(runner, "CudaBackend", machine.backend)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: machine.current or machine.ordinary)
        patch.setattr(torch.cuda, "default_stream", lambda device=None: machine.ordinary)
        patch.setattr(torch.cuda, "synchronize", machine.synchronize)
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, device=None, **k: allocate(*a, **k))
        patch.setattr(torch, "zeros", lambda *a, pin_memory=False, device=None, **k: zeros(*a, **k))
        patch.setattr(cuda_hold, "hold", hold)
        patch.setattr(cuda_hold, "why_not", lambda outcome: None)
        clock = SimpleNamespace(sleep=lambda seconds: machine.jitter(), monotonic=lambda: float(machine.looks()))
        patch.setattr(holds, "time", clock)
        patch.setattr(streamed, "time", clock)
        patch.setattr(cuda_streams, "time", clock)
        patch.setattr(cuda_streams, "Timer", type("MachineTimer", (Timer,), {"of": machine}))
        yield machine
