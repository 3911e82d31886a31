"""Real CUDA streams behind the interface that probes use. Work on a side stream is held before it runs.

The counterpart of `streams` where the engine's environment has a GPU. A hold is a spinning kernel in front of the work,
on the same stream. A reader that does not wait for the work reads before it has run.

Invariants:
- Nothing of torch is replaced. The engine calls the real streams, events and synchronisation.
- Holds end by themselves. Equal seeds and equal calls give equal holds. What runs during a hold is up to the device, so
  a pass says only that no wrong read was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import EAGER, LAZY

HOLD_CYCLES = 40_000_000
"""Cycles that a hold spins: 20 ms at 2 GHz, thousands of times what a small copy takes."""


class CudaMachine:
    """The streams of one device, and how long work on them is held."""

    def __init__(self, device: str) -> None:
        if not torch.cuda.is_available():
            raise CannotDrive(f"torch {torch.__version__} of this environment sees no CUDA device, asked for {device}")
        index = int(device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise CannotDrive(f"{device}: this machine has {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(index)
        self.reset(EAGER, 0)

    def reset(self, order: str, seed: int) -> None:
        """Wait for everything. From now on hold never (eager), always (lazy), or as the seed says (random)."""
        torch.cuda.synchronize()
        self._order = order
        self._mix = Rng(seed)
        self.queued = 0
        self.holds = 0

    def side(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream current."""
        context: AbstractContextManager[None] = torch.cuda.stream(stream)
        return context

    def queue(self, work: Callable[[], None]) -> None:
        """Put work on the current stream, behind a hold. Work that blocks the host would wait for the hold."""
        self.queued += 1
        if self._order == LAZY or (self._order != EAGER and self._mix.chance(1, 2)):
            self.holds += 1
            torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        work()

    def settle(self) -> None:
        """Wait for everything."""
        torch.cuda.synchronize()
