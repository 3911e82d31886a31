"""Deadline: a limit of wall time that also interrupts a long single step.

Invariants:
- TimeUp passes through `except Exception`, so that no target or oracle can catch it by accident.
- It is raised in the main thread inside `time_limit`, and never while a module is imported.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvcheck.core.base.errors import InternalError

IMPORTING = "<frozen importlib._bootstrap>"
LOOK_AGAIN_S = 0.02


class TimeUp(BaseException):
    """The time of a `time_limit` is over."""


@contextmanager
def time_limit(until: float | None) -> Iterator[None]:
    """Raise TimeUp inside the block when time.monotonic() reaches `until`; None: there is no limit.

    A signal does it, so a single call into C code is not cut; TimeUp is raised when it returns. Raises InternalError
    outside the main thread, where no signal arrives, and for a limit within a limit.
    """
    if until is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise InternalError("a time limit was set outside the main thread, where no signal arrives")
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeUp
    is_inside = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not is_inside:
            return
        if is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_S)
            return
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    if signal.setitimer(signal.ITIMER_REAL, left_s)[0]:
        raise InternalError("a time limit was set within a time limit")
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_importing(frame: FrameType | None) -> bool:
    """True while a module is imported. An exception then could be lost, or make a library abort the process."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False
