"""Handlers of SIGINT and SIGTERM. The first signal ends a run; while a run ends, its verdict stands.

Invariants:
- Interrupted is raised once. During an import, a destructor or a garbage collector callback it could be lost or abort
  the process: it is raised afterwards, with a line after TELL_AFTER_S.
- The third signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvcheck.commands.terminal import complain, warn
from kvcheck.core.base.deadline import LOOK_AGAIN_S, Interrupted, would_be_lost

INTERRUPTED = 130
MAX_SIGNALS = 3
TELL_AFTER_S = 0.4
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """is_end: for the seconds in which a run ends: the first signal prints a line, the second raises Interrupted."""

    def __init__(self, *, is_end: bool = False) -> None:
        self._count, self._is_end = 0, is_end
        self._tell_at: float | None = None

    def install(self) -> dict[signal.Signals, Callable[..., Any] | int | None]:
        """Return the handlers before. A signal that is ignored, as by nohup, stays so."""
        taken = [number for number in NUMBERS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        return {number: signal.signal(number, self) for number in taken}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= MAX_SIGNALS:
            os._exit(INTERRUPTED)
        elif self._count == 1 + self._is_end:
            self._tell_at = time.monotonic() + TELL_AFTER_S
            self._end(number, frame)
        elif self._is_end:
            warn("interrupted: the verdict stands, its reports are still written; once more leaves them out")

    def _end(self, number: int, frame: FrameType | None) -> None:
        if would_be_lost(frame):
            if self._tell_at is not None and time.monotonic() >= self._tell_at:
                self._tell_at = None
                complain("interrupted: it ends as soon as the libraries are loaded")
            signal.signal(signal.SIGALRM, self._end)
            signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_S)
            return
        raise Interrupted


@contextmanager
def verdict_stands() -> Iterator[None]:
    """Answer signals as at a run's end, in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = Interrupts(is_end=True).install() if is_main else {}
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)  # Interrupted that waits for an import would replace the verdict
        for number, handler in before.items():
            signal.signal(number, handler)
