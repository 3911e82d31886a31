"""Clocks: time a batch of calls on a CPU, on lanes that are threads, or on a CUDA device.

On a device, "events" times work of one stream as it is launched. "wall" waits for the device before and after and reads
the process's clock; only this includes the cost of a wait. Batches alternate between buffer sets that together exceed
the second-level cache, so each call finds that cache cold.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvcheck.core.base.cells import kind_of, number_of
from kvcheck.core.base.errors import InternalError, UnknownVerdict

Batch = Callable[[], int]
"""Runs its calls and returns their total nanoseconds."""

COLD_SHARE = 3
"""Total size of the buffer sets in second-level caches."""

SETS_MOST = 16
SCHEDULING = "/proc/thread-self/schedstat"
NO_PRICE = "threads: outputs are checked, times are no prices"

SPIN_S = 0.5
"""Work of a device before the first round: an idle one runs at a fifth of its clock rate."""
SPIN_ROWS, SPIN_CALLS = 2048, 200
LIBRARY = "libnvidia-ml.so.1"
OF_MULTIPROCESSORS = 1
"""NVML_CLOCK_SM of nvml.h."""


def nothing() -> None: ...


class Clock(Protocol):
    """Times batches on one device. no_price: why its times are no prices; None if they are."""

    name: str
    no_price: str | None

    def spin(self) -> dict[str, object]:
        """Bring the device to its full clock rate. Returns facts of it for the record."""

    def sets(self, size: int | None) -> int:
        """Return the number of buffer sets for an arm whose calls move `size` bytes."""

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Batch:
        """Return a batch: `count` calls, cycling through the given ones, timed in nanoseconds.

        join: makes the process wait for the lanes of the calls.
        """


class CpuClock:
    """The process's clock, less the time for which this thread was ready and had no core.

    On a shared machine that time is most of the noise. Waits that the work itself makes are counted.
    """

    name = "cpu"
    no_price: str | None = None

    def __init__(self) -> None:
        self._delay = _run_delay(self)

    def spin(self) -> dict[str, object]:
        return {}

    def sets(self, size: int | None) -> int:
        return 1

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Batch:
        (call,) = calls
        if count == 1:

            def once() -> int:
                delay = self._delay()
                start = time.perf_counter_ns()
                call()
                taken = time.perf_counter_ns() - start
                return max(1, taken - (self._delay() - delay))

            return once

        def run() -> int:
            delay = self._delay()
            start = time.perf_counter_ns()
            for _ in itertools.repeat(None, count):
                call()
            taken = time.perf_counter_ns() - start
            return max(1, taken - (self._delay() - delay))

        return run


class ThreadsClock(CpuClock):
    name = "threads"
    no_price: str | None = NO_PRICE

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Batch:
        (call,) = calls

        def call_all() -> None:
            for _ in itertools.repeat(None, count):
                call()
            join()

        timed = super().batch([call_all], 1, "wall")

        def run() -> int:
            join()
            return timed()

        return run


class CudaClock:
    no_price: str | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)

    def spin(self) -> dict[str, object]:
        """The multiprocessors' clock rate is read while products are running."""
        left, right = (torch.ones((SPIN_ROWS, SPIN_ROWS), device=self.device) for _ in range(2))
        until = time.monotonic() + SPIN_S
        while time.monotonic() < until:
            torch.mm(left, right)
            torch.cuda.synchronize(self.device)
        for _ in range(SPIN_CALLS):
            torch.mm(left, right)
        rate = sm_clock_mhz(str(torch.cuda.get_device_properties(self.device).uuid))
        torch.cuda.synchronize(self.device)
        return {"sm_clock_mhz": rate}

    def sets(self, size: int | None) -> int:
        if not size:
            return 1
        cache = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        return max(1, min(SETS_MOST, -(-COLD_SHARE * cache // size)))

    def batch(
        self, calls: list[Callable[[], object]], count: int, kind: str, join: Callable[[], None] = nothing
    ) -> Batch:
        chosen = [call for _, call in zip(range(count), itertools.cycle(calls), strict=False)]
        if kind == "wall":
            return lambda: self._wall(chosen)
        if kind == "events":
            return lambda: self._events(chosen)
        raise InternalError(f"expected a clock of wall or events, got {kind!r}")

    def _wall(self, calls: list[Callable[[], object]]) -> int:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter_ns()
        for call in calls:
            call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter_ns() - start

    def _events(self, calls: list[Callable[[], object]]) -> int:
        begin, end = _timing_event(), _timing_event()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return max(1, int(begin.elapsed_time(end) * 1e6))


def _run_delay(owner: object) -> Callable[[], int]:
    try:
        file = os.open(SCHEDULING, os.O_RDONLY)
    except OSError:
        return lambda: 0
    weakref.finalize(owner, os.close, file)  # kept open until then: opening it takes as long as some batches
    return lambda: int(os.pread(file, 96, 0).split()[1])


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: str) -> Clock:
    """Return the clock of a device. Raises UnknownVerdict if this machine has no such device."""
    kind, number = kind_of(device), number_of(device)
    if kind == "cpu":
        return CpuClock()
    if kind == "threads":
        return ThreadsClock()
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise UnknownVerdict(
            f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "see `kvcheck doctor`"
        )
    return CudaClock(torch.device("cuda", number))


def sm_clock_mhz(uuid: str, open_library: Callable[[str], Any] = ctypes.CDLL) -> int | str:
    """Return the current MHz of the GPU with that uuid (without "GPU-"), or the reason why it is unknown."""
    try:
        nvml = open_library(LIBRARY)
    except OSError as error:
        return f"UNKNOWN: {LIBRARY} does not open ({error}); next: nvidia-smi -q -d CLOCK"
    device, mhz = ctypes.c_void_p(), ctypes.c_uint()
    steps: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("nvmlInit_v2", ()),
        ("nvmlDeviceGetHandleByUUID", (f"GPU-{uuid}".encode(), ctypes.byref(device))),
        ("nvmlDeviceGetClockInfo", (device, OF_MULTIPROCESSORS, ctypes.byref(mhz))),
    )
    for name, arguments in steps:
        if code := getattr(nvml, name)(*arguments):
            return f"UNKNOWN: {name} returned {code}; next: nvidia-smi -q -d CLOCK"
    return mhz.value
