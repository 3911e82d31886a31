"""The rules of SEMANTICS.md on the threads backend, where races happen, and what is its own: errors, hangs, threads."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from litmus.programs import LITMUS, WAITS, Litmus
from litmus.rig import Rig

from kvcheck.core.base.errors import Hang, InternalError, LengthMismatch
from kvcheck.core.cache.backend import threads
from kvcheck.core.cache.backend.backend import Operation
from kvcheck.core.cache.backend.threads import ThreadDevice, ThreadsBackend, _Stream

HOLD_S = 0.002
RUNS = 10

every_litmus = pytest.mark.parametrize("litmus", LITMUS, ids=lambda litmus: litmus.name)


def seen_over_threads(litmus: Litmus, make: Callable[[], ThreadsBackend], hold_s: float = HOLD_S) -> Counter[str]:
    """The outcomes of a program over threads, each actor slow in its turn."""
    seen: Counter[str] = Counter()
    for run in range(RUNS):
        slow = (None, "a", "b", "c", "host")[run % 5]
        backend = make()
        seen[litmus.program(Rig(backend, lambda actor, slow=slow: time.sleep(hold_s * (actor == slow))))] += 1  # type: ignore[misc]
        backend.settle()
    return seen


@every_litmus
def test_threads_stay_within_the_allowed_outcomes(litmus: Litmus) -> None:
    seen = seen_over_threads(litmus, ThreadsBackend)
    assert sum(seen.values()) == RUNS
    assert set(seen) <= litmus.allowed, f"{litmus.name}: allowed {sorted(litmus.allowed)}, seen {dict(seen)}"


def test_threads_whose_waits_do_not_wait_are_caught() -> None:
    class Deaf(ThreadsBackend):
        def __init__(self) -> None:
            super().__init__()
            self._machine.wait = lambda stream, event: None  # type: ignore[method-assign]

    waits = [litmus for litmus in LITMUS if litmus.rule == WAITS]
    # A busy machine may start the waiting thread later than a short hold ends.
    assert any(
        not set(seen_over_threads(litmus, Deaf, hold_s)) <= litmus.allowed
        for hold_s in (HOLD_S, 0.05, 0.5)
        for litmus in waits
    )


def test_an_error_of_a_lane_is_raised_where_the_process_next_waits_and_ends_the_lane() -> None:
    backend = ThreadsBackend()
    lane = backend.lane("a")
    ran: list[int] = []

    def fails() -> None:
        raise LengthMismatch("the first error")

    backend.submit(Operation("fails", (fails,)), lane=lane)
    last = backend.submit(Operation("next", (lambda: ran.append(1),)), lane=lane)
    with pytest.raises(LengthMismatch, match="the first error"):
        backend.wait(last)
    assert backend.settle() is None
    assert not ran


def test_a_wait_for_what_never_comes_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, stands = ThreadsBackend(), threading.Event()
    monkeypatch.setattr(threads, "HANG_S", 0.05)
    ends = backend.submit(Operation("stands", (stands.wait,)), lane=backend.lane("a"))  # type: ignore[arg-type]
    with pytest.raises(Hang, match=r"a lane has not come to what the process waits for in 0\.05 s"):
        backend.wait(ends)
    stands.set()
    backend.settle()


def test_the_threads_of_a_backend_end_with_it() -> None:
    for end in (ThreadsBackend.settle, lambda dropped: None):
        backend, before = ThreadsBackend(), {*threading.enumerate()}
        for name in ("a", "b"):
            backend.submit(Operation("nothing", (lambda: None,)), lane=backend.lane(name))
        began = {*threading.enumerate()} - before
        end(backend)
        del backend
        assert len(began) == 2
        if end is not ThreadsBackend.settle:  # they end by themselves
            for each in began:
                each.join(60)
        assert not any(each.is_alive() for each in began)


@pytest.mark.parametrize("kind", [ValueError, KeyError, SystemExit])
def test_of_the_errors_of_two_lanes_the_first_is_raised_once(kind: type[BaseException]) -> None:
    backend, second = ThreadsBackend(), threading.Event()

    def fails() -> None:
        try:
            raise kind("the first error")
        finally:
            second.set()

    def fails_too() -> None:
        second.wait()
        raise LengthMismatch("its doing")

    ends = [
        backend.submit(Operation("fails", (work,)), lane=backend.lane(work.__name__)) for work in (fails, fails_too)
    ]
    with pytest.raises(kind, match="the first error"):
        for end in ends:
            backend.wait(end)
    assert backend.settle() is None


def test_an_error_that_shows_at_the_end_is_one_of_the_device() -> None:
    backend = ThreadsBackend()

    def fails() -> None:
        raise ValueError("a chunk went wrong")

    backend.submit(Operation("fails", (fails,)), lane=backend.lane("a"))
    with pytest.raises(RuntimeError, match="ValueError: a chunk went wrong"):
        backend.settle()


def test_a_settled_backend_takes_no_more_work() -> None:
    backend = ThreadsBackend()
    lane = backend.lane("a")
    backend.submit(Operation("nothing", (lambda: None,)), lane=lane)
    backend.settle()
    with pytest.raises(InternalError, match="a lane of a settled backend was given work"):
        backend.submit(Operation("nothing", (lambda: None,)), lane=lane)


def test_a_backend_that_is_collected_ends_its_threads_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may come while another thread holds the lock that a thread needs to end."""
    joined: list[object] = []
    monkeypatch.setattr(_Stream, "join", lambda stream: joined.append(stream))
    device = ThreadDevice()
    stream, ran = device.stream(), threading.Event()
    stream.put(ran.set)
    assert ran.wait(60)
    (thread,) = (each for each in threading.enumerate() if each is stream._thread)
    del device, stream
    gc.collect()
    assert joined == []
    thread.join(60)
    assert not thread.is_alive()
    other = ThreadDevice()
    left = other.stream()
    other.close()
    assert joined == [left], "who closes a device waits for its threads"
