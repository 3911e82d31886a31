"""Holds on CUDA streams: a kernel of one warp in front of an operation, a flag in pinned memory that ends it.

Invariants:
- Nothing hangs: every hold has a watchdog on the device's own clock, and the process releases holds before it waits.
- Flags, outcomes and the kernel are made and loaded before the first hold. Doing so later may wait for the device, and
  so for a held lane.
- Only the process writes the flag, and without a stream. So a release never queues behind what it releases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.backend.delays import Delay, Delayer, DelayReport, Hold
from kvcheck.kernels.compilers import asks_triton
from kvcheck.kernels.hold import hold, release_torch

WATCHDOG_NS = 250_000_000
"""The device's clock ends a hold after so long."""

LOOKS_MOST = 1 << 32
"""Looks that end a hold whose clock stands still: hours, where one look takes a microsecond."""

HOLDS_MOST = 64
"""Holds that can be in place or not yet counted; a lane has at most one in place."""

GRACE_LOOKS = 20
GRACE_S = 0.0001
"""Before the process releases holds to wait, it looks so often, so far apart, whether the wait ends without that."""

POLLS_MOST = 1000
"""After so many polls without success all lanes are released: a process that only polls would wait for ever."""


class _CudaHold:
    """One place of the stock: its flag, its outcome, and the event behind the kernel that reads them."""

    def __init__(self, flag: torch.Tensor, outcome: torch.Tensor, read: Callable[[torch.Tensor], int]) -> None:
        self.flag = flag
        self.outcome = outcome
        self.event: torch.cuda.Event | None = None
        self._read = read

    def release(self) -> None:
        release_torch(self.flag, 1)

    def has_ended(self) -> bool:
        return self.event is not None and bool(self.event.query())  # type: ignore[no-untyped-call]

    def has_fired(self) -> bool:
        return self._read(self.outcome) == 0


class CudaHolds:
    """Puts the holds that a Delayer decides on the streams of one device."""

    def __init__(self, delays: Sequence[Delay], device: torch.device, service: torch.cuda.Stream) -> None:
        self._delayer = Delayer(delays)
        self._service = service
        self._polls = 0
        self._ends: list[tuple[Hold, torch.cuda.Event]] = []
        self._arrived: tuple[Hold, ...] = ()
        # Two words for each place, so that every flag has the alignment of the first and the kernel is compiled once.
        flags = torch.zeros((HOLDS_MOST, 2), dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(service):
            outcomes = torch.zeros((HOLDS_MOST, 2), dtype=torch.int64, device=device)
        if not asks_triton(outcomes):
            raise UnknownVerdict("delays on a device need triton, which holds a lane; pip install 'kvcheck[triton]'")
        self._stock = [_CudaHold(flags[at, :1], outcomes[at], self._outcome) for at in range(HOLDS_MOST)]
        self._free = [*self._stock]
        first = self._free[0]
        first.release()
        self._launch(first, service)
        service.synchronize()

    def before(self, names: Sequence[str], lane: Lane, stream: torch.cuda.Stream) -> None:
        """Hold the lane if a delay says so. names: of the operations that are submitted now, together."""
        self._look()
        arrived: list[Hold] = []
        for name in names:
            row = self._delayer.arrives(name, lane)
            if row is not None and self._free:
                taken = self._free.pop()
                taken.flag.fill_(0)
                self._launch(taken, stream)
                self._delayer.place(row, lane, taken)
            arrived += self._delayer.overtaking(name, lane)
        self._arrived = tuple(dict.fromkeys(arrived))

    def behind(self, event: torch.cuda.Event) -> None:
        """The submitted operations have run when the event is reached. Holds that they were to overtake end then."""
        self._ends += [(each, event) for each in self._arrived]
        self._arrived = ()

    def polled(self, is_reached: bool) -> None:
        """The process has asked whether a record is reached."""
        self._look()
        self._polls = 0 if is_reached or not self._delayer.is_holding else self._polls + 1
        if self._polls >= POLLS_MOST:
            self._polls = 0
            self._delayer.give_way()

    def give_way(self, is_reached: Callable[[], bool]) -> None:
        """Release all lanes before the process waits, unless the wait ends without that."""
        for _ in range(GRACE_LOOKS):
            self._look()
            if is_reached() or not self._delayer.is_holding:
                return
            time.sleep(GRACE_S)
        self._delayer.give_way()

    def report(self) -> DelayReport:
        """The report of the delays. Call it when every lane is released and the device is idle."""
        self._look()
        return self._delayer.report()

    def _look(self) -> None:
        waiting = []
        for each, event in self._ends:
            if event.query():  # type: ignore[no-untyped-call]
                self._delayer.overtaken(each)
            else:
                waiting.append((each, event))
        ended = self._delayer.look()
        self._free += [each for each in self._stock if each in ended]
        self._ends = [(each, event) for each, event in waiting if each not in ended]  # the place may be used again

    def _launch(self, taken: _CudaHold, stream: torch.cuda.Stream) -> None:
        taken.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            hold(taken.flag, taken.outcome, until=1, looks=LOOKS_MOST, limit_ns=WATCHDOG_NS)
            taken.event.record(stream)

    def _outcome(self, outcome: torch.Tensor) -> int:
        """How a hold has ended. Its kernel has run, so the copy waits for nothing else."""
        with torch.cuda.stream(self._service):
            return int(outcome[0])
