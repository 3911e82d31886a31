"""A limit of wall time holds inside loops, cannot be swallowed, and is gone when its block is."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcheck.core.base.deadline import Stuck, TimeUp, progress_watch, time_limit
from kvcheck.core.base.errors import InternalError


def spin(seconds: float) -> None:
    """Work that catches what it can."""
    busy(time.monotonic, seconds)


def burn(cpu_s: float, *, progress: list[int] | None = None) -> None:
    """Use CPU time; with `progress`, make some all the while."""
    busy(time.process_time, cpu_s, progress)


def busy(clock: Callable[[], float], seconds: float, progress: list[int] | None = None) -> None:
    until = clock() + seconds
    while clock() < until:
        if progress is not None:
            progress[0] += 1
        try:
            sum(range(1000))
        except Exception:  # what a target does
            continue


def test_limit_ends_work_that_catches_every_exception() -> None:
    began = time.monotonic()
    with pytest.raises(TimeUp), time_limit(began + 0.2):
        spin(30.0)
    assert 0.15 < time.monotonic() - began < 10


def test_no_limit_and_a_limit_that_is_kept_raise_nothing() -> None:
    with time_limit(None):
        spin(0.01)
    with time_limit(time.monotonic() + 60):
        spin(0.01)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_limit_that_is_over_runs_nothing() -> None:
    ran = []
    with pytest.raises(TimeUp), time_limit(time.monotonic() - 1):
        ran.append(1)
    assert not ran


def test_limit_is_gone_with_its_block() -> None:
    with pytest.raises(KeyError), time_limit(time.monotonic() + 0.1):
        raise KeyError
    spin(0.2)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_limit_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.3)\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TimeUp), time_limit(time.monotonic() + 0.05):
        import slow_to_import  # type: ignore[import-not-found]

        assert slow_to_import.DONE
        spin(30.0)
    assert sys.modules["slow_to_import"].DONE


def in_a_thread(work: Callable[[], None]) -> list[BaseException | None]:
    """The error of the work, or None where it ended."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            ended.append(None)
        except InternalError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return ended


def test_limit_outside_the_main_thread_or_within_another_is_our_own_mistake() -> None:
    def limited() -> None:
        with time_limit(time.monotonic() + 60):
            spin(0.01)

    (error,) = in_a_thread(limited)
    assert isinstance(error, InternalError)
    with time_limit(time.monotonic() + 60), pytest.raises(InternalError):
        limited()


def destructor() -> None:
    class Slow:
        def __del__(self) -> None:
            spend(0.3)

    held = Slow()
    del held


def collector() -> None:
    def slow(phase: str, info: dict[str, int]) -> None:
        spend(0.2)

    gc.callbacks.append(slow)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(slow)


def weak_set() -> None:
    class Slow:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            spend(0.1)
            return self is other

    held, others = Slow(), weakref.WeakSet([Slow()])
    assert held not in others


@pytest.mark.parametrize("work", [destructor, collector, weak_set])
def test_limit_waits_where_an_exception_would_be_printed_and_lost(work: Callable[[], None]) -> None:
    with pytest.raises(TimeUp), time_limit(time.monotonic() + 0.05):
        work()
        spend(5)


def spend(seconds: float) -> None:
    """Let time pass in this thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_work_without_progress_is_stuck_by_its_cpu_time() -> None:
    before = time.process_time()
    with pytest.raises(Stuck), progress_watch(0.1, lambda: 0):
        burn(30.0)
    assert time.process_time() - before < 15, "it is ended long before its work"


def test_work_that_makes_progress_or_waits_is_not_stuck() -> None:
    made = [0]
    with progress_watch(0.05, lambda: made[0]):
        burn(0.4, progress=made)
        time.sleep(0.2)
    assert made[0] and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_work_that_stops_making_progress_is_stuck_later() -> None:
    made = [0]
    with pytest.raises(Stuck), progress_watch(0.1, lambda: made[0]):
        burn(0.25, progress=made)
        burn(30.0)


def test_a_watch_stands_within_a_limit_and_is_gone_with_its_block() -> None:
    with pytest.raises(TimeUp), time_limit(time.monotonic() + 0.2), progress_watch(60.0, lambda: 0):
        burn(30.0)
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    with pytest.raises(InternalError), progress_watch(60.0, lambda: 0), progress_watch(60.0, lambda: 0):
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_outside_the_main_thread_there_is_no_watch() -> None:
    def watched() -> None:
        with progress_watch(0.01, lambda: 0):
            burn(0.1)

    assert in_a_thread(watched) == [None]
