"""The threads backend: a stream is a thread, an event is a real event, and memory is the host's.

A missing wait is a real race over real bytes. Unlike the simulated backend it shows work of the process that races with
a lane, torn copies, and waits that never end.

Invariants:
- A lane's thread sleeps a random time before some chunks. Two runs of one plan differ.
- The first error of a chunk is raised once, at the next query or wait of the process, as on a device. Later chunks of
  that lane do not run, and its events are reached.
- A wait of the process raises Hang after HANG_S, once.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from kvcheck.core.base.errors import Hang, InternalError, TargetError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import POISON_BYTE, ChunkWork, Place
from kvcheck.core.cache.backend.delays import Delay
from kvcheck.core.cache.backend.device import WATCHDOG_NS, DeviceHold
from kvcheck.core.cache.backend.streamed import StreamedBackend
from kvcheck.core.cache.events import Emit

HANG_S = 60.0
"""Longest wait of the process. A watchdog ends a hold after a quarter of a second."""
END_S = 1.0
"""Longest wait for the end of a thread. A blocked one is left, and ends with the process."""
GRACE_S = 0.02
"""Longer than on a device: threads take turns, and sleep."""
SLEEPS = 0.3
SLEEP_MOST_S = 0.001
"""The share of chunks before which a lane's thread sleeps, and for how long at most."""


class ThreadsBackend(StreamedBackend["_Stream", "_Event"]):
    name = "threads"

    def __init__(self, emit: Emit | None = None, delays: Sequence[Delay] = ()) -> None:
        super().__init__(ThreadDevice(), emit, delays)


class ThreadDevice:
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.grace_s = GRACE_S
        self._streams: list[_Stream] = []
        self._errors: list[Exception | SystemExit] = []
        self._is_told = self._is_hung = False
        _DEVICES.add(self)
        weakref.finalize(self, _let_end, self._streams).atexit = False

    def stream(self) -> _Stream:
        self._streams.append(_Stream(self._errors))
        return self._streams[-1]

    def event(self) -> _Event:
        return _Event()

    def run(self, stream: _Stream, work: Sequence[ChunkWork], name: str = "") -> None:
        for chunk in work:
            stream.put(chunk, is_chunk=True)

    def record(self, event: _Event, stream: _Stream) -> None:
        event.reached = reached = threading.Event()
        stream.put(reached.set)

    def wait(self, stream: _Stream, event: _Event) -> None:
        stream.put(event.reached.wait)

    def has_run(self, event: _Event) -> bool:
        self._raise()
        return event.reached.is_set()

    def join(self, event: _Event) -> None:
        if not event.reached.wait(END_S if self._is_hung else HANG_S):
            if self._is_hung:
                return
            self._is_hung = True
            raise Hang(f"backend threads: a lane has not come to what the process waits for in {HANG_S:g} s")
        self._raise()

    def capture(self, work: Sequence[ChunkWork], last: object | None) -> object:
        return tuple(work)

    def replay(self, stream: _Stream, captured: object) -> None:
        if not isinstance(captured, tuple):
            raise InternalError(f"expected a graph of backend threads, got one that holds a {type(captured).__name__}")
        self.run(stream, captured)

    def holds(self, count: int) -> Sequence[DeviceHold[_Stream]]:
        return [_Hold() for _ in range(count)]

    def empty(self, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
        return tensor

    def upload(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def synchronize(self) -> None:
        """Wait for all streams, and raise a chunk's error like an error of the device."""
        ends = [_Event() for _ in self._streams]
        for end, stream in zip(ends, self._streams, strict=True):
            self.record(end, stream)
        try:
            for end in ends:
                self.join(end)
        except (RuntimeError, TargetError):
            raise
        except (Exception, SystemExit) as error:  # a chunk may raise anything
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        _end(self._streams)

    def _raise(self) -> None:
        if self._errors and not self._is_told:
            self._is_told = True
            raise self._errors[0]


class _Stream:
    """A queue and its thread, which starts with the first work."""

    def __init__(self, errors: list[Exception | SystemExit]) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], object], bool] | None] = SimpleQueue()
        self._errors = errors
        self._thread: threading.Thread | None = None
        self._is_broken = self._is_ended = False

    def put(self, work: Callable[[], object], *, is_chunk: bool = False) -> None:
        if self._is_ended:
            raise InternalError("a lane of a settled backend was given work; make a new backend")
        if self._thread is None:
            # A daemon: a process that gives up a Hang is not kept by a thread that waits.
            self._thread = threading.Thread(target=self._run, name="kvcheck lane", daemon=True)
            self._thread.start()
        self._queue.put((work, is_chunk))

    def end(self) -> None:
        self._is_ended = True
        if self._thread is not None:
            self._queue.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        torch.set_num_threads(1)
        chance = random.Random()
        while (entry := self._queue.get()) is not None:
            work, is_chunk = entry
            if is_chunk and self._is_broken:
                continue
            if is_chunk and chance.random() < SLEEPS:
                time.sleep(chance.random() * SLEEP_MOST_S)
            try:
                work()
            except (Exception, SystemExit) as error:  # of any kind: it is the process's to judge
                self._is_broken = True
                self._errors.append(error)


_DEVICES: weakref.WeakSet[ThreadDevice] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch at interpreter exit could end the process with an error."""
    for device in [*_DEVICES]:
        device.close()


def _end(streams: list[_Stream]) -> None:
    _let_end(streams)
    for stream in streams:
        stream.join()
    streams.clear()


def _let_end(streams: list[_Stream]) -> None:
    """Queue the threads' end without waiting. The garbage collector may call this while a starting thread holds a lock
    that each thread needs to end."""
    for stream in streams:
        stream.end()


class _Event:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()


class _Hold:
    def __init__(self) -> None:
        self._flag = threading.Event()
        self._ended = threading.Event()
        self._has_fired = False

    def place(self, stream: _Stream) -> None:
        self._flag, self._ended, self._has_fired = threading.Event(), threading.Event(), False
        stream.put(self._stand)

    def release(self) -> None:
        self._flag.set()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def has_fired(self) -> bool:
        return self._has_fired

    def _stand(self) -> None:
        self._has_fired = not self._flag.wait(WATCHDOG_NS / 1e9)
        self._ended.set()
