"""Limits: of wall time, which also interrupts a long single step, and of CPU time without progress.

Invariants:
- TimeUp and Stuck pass through `except Exception`, so that no target or oracle catches one by accident.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvcheck.core.base.errors import InternalError

IMPORTING = "<frozen importlib._bootstrap>"
WEAK = frozenset(kind.__init__.__code__.co_filename for kind in (weakref.WeakSet, weakref.WeakKeyDictionary))
LOOK_AGAIN_S = 0.02


class Interrupted(KeyboardInterrupt):
    """A signal of the user or of the parent process; code under test cannot have raised it."""


class TimeUp(BaseException):
    pass


class Stuck(BaseException):
    pass


@contextmanager
def time_limit(until: float | None) -> Iterator[None]:
    """Raise TimeUp inside the block when time.monotonic() reaches `until`; None: no limit.

    A call into C code is not cut; TimeUp follows when it returns. Raises InternalError outside the main thread, which
    receives no signals, and for a limit within a limit.
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
        if would_be_lost(frame):
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


@contextmanager
def progress_watch(most_cpu_s: float, progress: Callable[[], int]) -> Iterator[None]:
    """Raise Stuck inside the block after `most_cpu_s` to twice as many CPU seconds with the same `progress`.

    A watch may stand inside a time limit; outside the main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_inside = True
    seen = progress()

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if not is_inside:
            return
        if would_be_lost(frame):
            signal.setitimer(signal.ITIMER_PROF, LOOK_AGAIN_S)
            return
        if progress() == seen:
            raise Stuck
        seen = progress()
        signal.setitimer(signal.ITIMER_PROF, most_cpu_s)

    before = signal.signal(signal.SIGPROF, ring)
    if signal.setitimer(signal.ITIMER_PROF, most_cpu_s)[0]:
        raise InternalError("work was watched within watched work")
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def would_be_lost(frame: FrameType | None) -> bool:
    """True if an exception raised here could be lost, or make a library abort the process.

    That is during an import, and in calls whose exceptions the interpreter only prints: destructors, callbacks of the
    garbage collector and of weak collections.
    """
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code.co_filename == IMPORTING or code.co_filename in WEAK or code.co_name == "__del__" or code in collecting:
            return True
        frame = frame.f_back
    return False
