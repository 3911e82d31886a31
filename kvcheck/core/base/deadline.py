"""Deadline: a limit of wall time that also interrupts a long single step, and a watch for work that makes no progress.

Invariants:
- TimeUp and Stuck pass through `except Exception`, so that no target or oracle can catch one by accident.
- They are raised in the main thread inside their blocks, and only where they cannot be lost.
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
"""Where Python keeps the callbacks of its weak collections."""
LOOK_AGAIN_S = 0.02


class Interrupted(KeyboardInterrupt):
    """A signal of the user or of the parent process, which code under test cannot have raised itself."""


class TimeUp(BaseException):
    """The time of a `time_limit` is over."""


class Stuck(BaseException):
    """Work inside a `progress_watch` used much processor time and made no progress."""


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
    """Raise Stuck inside the block once this process has used so many CPU seconds, and at most twice as many, while
    `progress` stayed the same.

    It counts CPU time, so a busy machine does not matter. It may stand inside a time limit. Outside the main thread,
    where no signal arrives, there is no watch.
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
    """True where an exception could be lost, or make a library abort the process.

    That is while a module is imported, and in what the interpreter calls by itself and whose exceptions it only prints:
    destructors, callbacks of the garbage collector and those of weak collections.
    """
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code.co_filename == IMPORTING or code.co_filename in WEAK or code.co_name == "__del__" or code in collecting:
            return True
        frame = frame.f_back
    return False
