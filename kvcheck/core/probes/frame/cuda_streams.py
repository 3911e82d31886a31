"""Real CUDA streams behind the interface that probes use. Work on a side stream is held before it runs.

A hold is a kernel in front of the work, on the same stream, that waits for a flag of the process. A read that ran while
the work was held came before the work; a read that ran only after the release has waited for it.

    side stream    hold | rows of layer 0 | hold | rows of layer 1 | ...
    main stream    the engine's read of layer 1, then a copy of the rows that it read
    process        has the copy run? if not: release the first hold. Has it run? if not: release the next ...

Without triton a hold spins for a fixed number of cycles; the device decides which work runs meanwhile.

Invariants:
- No hold stands when this module makes the process wait for the device. A hold that the engine waits for ends by itself
  after LIMIT_NS; it has imposed no order, and is counted.
- Tensors of queued work stay in memory until it has run: the allocator knows only the stream that made them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Timer
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcheck.core.base.cuda_hold import CudaHold, cuda_holds
from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.streams import EAGER, LAZY, HoldReport

__tracebackhide__ = True

HOLD_CYCLES = 40_000_000
"""Spin cycles of a hold without triton: 20 ms at 2 GHz, thousands of times the duration of a small copy."""

LIMIT_NS = 250_000_000

HOLDS_MOST = 256
"""Holds between two settlements. To make more while streams are held might wait for them."""

GRACE_S, GRACE_LOOKS = 0.002, 20
"""Time, and number of polls, for a read that waits for nothing: a hundred times its duration."""

WAIT_S = 0.02
"""Held work is released this long after the start of a call that may wait: a call that does not wait has read by
then."""

POLLS_MOST = 1000
"""Failed polls after which one hold is released: a process that only polls would wait for the watchdog."""


@dataclass(frozen=True, slots=True)
class StandingHold:
    """A standing hold. stream: the driver's number. goes_last: it is released after all others."""

    hold: CudaHold
    stream: int
    goes_last: bool


class CudaMachine:
    def __init__(self, device: str) -> None:
        if not torch.cuda.is_available():
            raise CannotDrive(f"torch {torch.__version__} of this environment sees no CUDA device, asked for {device}")
        index = int(device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise CannotDrive(f"{device}: this machine has {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(index)
        self._has_run: Callable[[Any], bool] = torch.cuda.Event.query
        made = attempt(lambda: _made_holds(torch.device("cuda", index)))
        self._why_spin = made.text if isinstance(made, Fault) else made if isinstance(made, str) else None
        self._free: list[CudaHold] = made if isinstance(made, list) else []
        self._standing: list[StandingHold] = []  # not let go, in the order in which they will go
        self._placed: list[CudaHold] = []  # since the last settlement
        self._kept: list[Callable[[], None]] = []  # queued since then, with the tensors that it uses
        self._report = HoldReport()
        self.fired = 0
        self.reset(EAGER, 0)

    def reset(self, order: str, seed: int) -> None:
        self.settle()
        self._order = order
        self._mix = Rng(seed)
        self._polls = 0
        self.queued = 0
        self.fired = 0

    @property
    def main(self) -> Any:
        return torch.cuda.default_stream()

    def side(self) -> Any:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = torch.cuda.stream(stream)
        return context

    def queue(self, work: Callable[[], None], *, goes_last: bool = False) -> None:
        """Work that blocks the host would wait for the hold."""
        self.queued += 1
        self.delay(goes_last=goes_last)
        self._kept.append(work)
        work()

    def delay(self, *, goes_last: bool = False) -> None:
        if self._order == LAZY or (self._order != EAGER and self._mix.chance(1, 2)):
            self._hold(goes_last)

    def hold_no_more(self) -> None:
        self._order = EAGER

    def taken(self, read: Sequence[torch.Tensor], *, rest_stays: bool = False) -> Sequence[torch.Tensor]:
        """Release only the holds that the read waits for. Holds that spin cannot be released: without rest_stays
        nothing is copied then."""
        if self._why_spin is not None and not rest_stays:
            return read
        copies = [each.clone() for each in read]
        behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
        behind.record()
        self.let_go_until(partial(self._has_run, behind))
        if not rest_stays:
            self.let_go()
        return copies

    def has_reached(self, is_reached: Callable[[], bool]) -> bool:
        if self._standing and self._order not in (EAGER, LAZY) and self._mix.chance(1, 2):
            self._let_first_go()
        return _is_soon(is_reached)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        timer = Timer(WAIT_S, self.let_go)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def let_go_until(self, is_reached: Callable[[], bool], *, on: Any = None) -> None:
        going = [each for each in self._standing if on is None or each.stream == on.cuda_stream]
        while going and not _is_soon(is_reached):
            self._let_go(going.pop(0))

    def polled(self, is_reached: bool) -> None:
        self._polls = 0 if is_reached else self._polls + 1
        if self._polls >= POLLS_MOST and self._standing:
            self._polls = 0
            self._let_first_go()

    def let_go(self) -> None:
        while self._standing:
            self._let_first_go()

    def settle(self) -> None:
        self.let_go()
        torch.cuda.synchronize()
        fired = sum(each.has_fired() for each in self._placed)
        self.fired += fired
        self._report = self._report.plus(HoldReport(fired=fired))
        self._free += self._placed
        self._placed = []
        self._kept = []

    def take_report(self) -> HoldReport:
        report, self._report = self._report, HoldReport()
        return report

    def _hold(self, goes_last: bool) -> None:
        if self._why_spin is not None:
            torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
            self._report = self._report.plus(HoldReport(spun=1, why_spin=self._why_spin))
        elif not self._free:
            self._report = self._report.plus(HoldReport(lacking=1))
        else:
            hold = self._free.pop()
            hold.stand()
            self._standing.append(StandingHold(hold, torch.cuda.current_stream().cuda_stream, goes_last))
            self._standing.sort(key=lambda each: each.goes_last)
            self._placed.append(hold)
            self._report = self._report.plus(HoldReport(placed=1))

    def _let_first_go(self) -> None:
        self._let_go(self._standing[0])

    def _let_go(self, standing: StandingHold) -> None:
        self._standing.remove(standing)
        standing.hold.release()


def _made_holds(device: torch.device) -> list[CudaHold] | str:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    made = cuda_holds(HOLDS_MOST, device, stream, limit_ns=LIMIT_NS, read=lambda outcome: int(outcome[0]))
    if isinstance(made, str):
        return f"triton is needed, and {made}"
    beside = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made[0].place(stream)
    beside.record()
    is_beside = _is_soon(beside.query)
    if is_beside:
        torch.zeros(1, device=device).cpu()  # a read of another stream reaches the process meanwhile
    has_ended = made[0].has_ended()
    made[0].release()
    stream.synchronize()
    if has_ended:
        return "a hold on this device does not hold"
    if not is_beside:
        return "the other streams of this device stand still behind one that is held"
    return "a flag that is raised does not reach a hold on this device" if made[0].has_fired() else made


def _is_soon(is_reached: Callable[[], bool]) -> bool:
    for _ in range(GRACE_LOOKS):
        if is_reached():
            return True
        time.sleep(GRACE_S / GRACE_LOOKS)
    return is_reached()


class CopiesToHost(TorchFunctionMode):
    """Make `.to(device)` and `.cpu()` return tensors with memory of their own in this block."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        made = func(*args, **named)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and _names_side((*args[1:], named.get("device")))):
            source = args[0].untyped_storage()
            return made.clone() if made.untyped_storage().data_ptr() == source.data_ptr() else made
        return made


def _names_side(given: tuple[Any, ...]) -> bool:
    return any(isinstance(each, (str, torch.device)) for each in given)
