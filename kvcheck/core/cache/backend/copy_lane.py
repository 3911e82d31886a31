"""CopyLane: a thread that copies bytes in order, like a copy engine or a stream.

Invariants:
- Copies of one lane run one after another; two lanes are unordered.
- The first copy that fails ends its lane: later ones are skipped, and `submit` raises from then on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from kvcheck.core.base.errors import TransferError
from kvcheck.kernels.page_copy import copy_bytes_torch

LAND_S = 60.0
"""A copy that takes longer than this hangs."""


class Landing:
    """The end of the copies submitted so far, done or skipped."""

    __slots__ = ("_ends",)

    def __init__(self, ends: Iterable[threading.Event]) -> None:
        self._ends = tuple(ends)

    @property
    def is_reached(self) -> bool:
        return all(end.is_set() for end in self._ends)

    def wait(self) -> None:
        """Block until it is reached. Raise TransferError after LAND_S seconds."""
        for end in self._ends:
            if not end.wait(LAND_S):
                raise TransferError(f"copies have not landed in {LAND_S:g} s")


class CopyLane:
    """A lane with a thread, and on CUDA a stream, of its own. device: the source's."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._works: queue.SimpleQueue[tuple[Callable[[], None], threading.Event | None]] = queue.SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> Landing:
        if self._error is not None:
            raise TransferError(f"{self._name}: a copy failed: {self._error}") from self._error
        self._last = threading.Event()
        self._works.put((work, self._last))
        return self.landing

    @property
    def landing(self) -> Landing:
        return Landing((self.end,))

    @property
    def end(self) -> threading.Event:
        return self._last

    def close(self, last: Callable[[], None]) -> None:
        """End the thread behind its queue, then call `last`, whatever has failed."""
        self._works.put((last, None))

    def _run(self) -> None:
        with _stream(self._device):
            while True:
                work, end = self._works.get()
                if end is None:
                    work()
                    return
                try:
                    if self._error is None:
                        work()
                except (TransferError, OSError, RuntimeError) as error:  # torch raises RuntimeError for a device's
                    self._error = error
                finally:
                    end.set()


def copy_and_join(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        copy_bytes_torch(target, source)
    if any(target.is_cuda for target, _ in pairs[:1]):
        torch.cuda.current_stream().synchronize()


def _stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
