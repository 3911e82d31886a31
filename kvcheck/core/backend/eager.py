"""The eager backend: every operation runs when it is submitted, on the CPU.

Invariants:
- The reference for what an operation means; it shows no ordering mistake at all, so it proves nothing about order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcheck.core.backend.backend import Footprint, Lane, Operation, OperationObserver, Signal
from kvcheck.core.backend.memory import HostMemory

_DONE = object()


class EagerBackend(HostMemory):
    """Runs operations at once. Signals are done as soon as they are recorded."""

    name = "eager"
    device = torch.device("cpu")

    def __init__(self, observer: OperationObserver | None = None) -> None:
        super().__init__()
        self._observer = observer
        self._lanes: dict[str, Lane] = {}
        self._submitted = 0

    def lane(self, name: str) -> Lane:
        """The lane of that name."""
        return self._lanes.setdefault(name, Lane(len(self._lanes), name))

    def signal(self) -> Signal:
        """A never-recorded signal."""
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
        """Run the operation now."""
        self._submitted += 1
        ordinal = self._submitted
        if self._observer is not None:
            self._observer.submitted(ordinal, operation, lane, reads, writes)
        for part in operation.parts:
            part()
        if self._observer is not None:
            self._observer.completed(ordinal)
        return Signal(_DONE)

    def record(self, signal: Signal, *, lane: Lane) -> None:
        """Everything queued has run already."""
        signal.handle = _DONE

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        """Nothing can be pending."""

    def query(self, signal: Signal) -> bool:
        """Always reached; a never-recorded signal counts as reached, as on CUDA."""
        return True

    def drain(self) -> None:
        """Nothing can be pending."""
