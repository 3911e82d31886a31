"""Holds on streams of a CUDA device: for lanes of the CUDA backend and for streams of an installed engine.

A hold is a kernel of one warp that polls a flag in pinned memory until the process raises it.

Invariants:
- All is made and loaded before the first hold: later, this may wait for a held stream.
- The process writes the flag without a stream, so a release never queues behind the held work.
- A hold ends by itself after its limit; it has then fired, and imposed no order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcheck.kernels.hold import hold, release_torch, why_not

LOOKS_MOST = 1 << 32
"""Polls that end a hold whose clock stands still: over an hour at one microsecond each."""


class CudaHold:
    """One hold, reusable once it has ended. read: returns the value of an ended hold's outcome."""

    def __init__(
        self, flag: torch.Tensor, outcome: torch.Tensor, limit_ns: int, read: Callable[[torch.Tensor], int]
    ) -> None:
        self._flag = flag
        self._outcome = outcome
        self._limit_ns = limit_ns
        self._read = read
        self._event: torch.cuda.Event | None = None

    def place(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self.stand()

    def stand(self, *, is_raised: bool = False) -> None:
        """Hold the current stream from here on. is_raised: the hold ends at once."""
        release_torch(self._flag, int(is_raised))
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        hold(self._flag, self._outcome, until=1, looks=LOOKS_MOST, limit_ns=self._limit_ns)
        self._event.record()

    def release(self) -> None:
        release_torch(self._flag, 1)

    def has_ended(self) -> bool:
        return self._event is not None and bool(self._event.query())  # type: ignore[no-untyped-call]

    def has_fired(self) -> bool:
        return self._read(self._outcome) == 0


def cuda_holds(
    count: int, device: torch.device, stream: torch.cuda.Stream, *, limit_ns: int, read: Callable[[torch.Tensor], int]
) -> list[CudaHold] | str:
    """Make `count` holds, or return why the device's streams cannot be held. stream: for the setup; not held."""
    # Two words for each place, so that every flag has the alignment of the first and the kernel is compiled once.
    flags = torch.zeros((count, 2), dtype=torch.int64, pin_memory=True)
    with torch.cuda.stream(stream):
        outcomes = torch.zeros((count, 2), dtype=torch.int64, device=device)
    if why := why_not(outcomes):
        return why
    made = [CudaHold(flags[at, :1], outcomes[at], limit_ns, read) for at in range(count)]
    with torch.cuda.stream(stream):
        made[0].stand(is_raised=True)
    stream.synchronize()
    return made
