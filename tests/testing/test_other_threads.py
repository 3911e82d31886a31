"""check_round_trip: save and load that copy in other threads, which run as late as the call allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from queue import Queue
from typing import Any

import pytest
from rigs.own_pools import Pool, found, judged


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def submitted(work: Callable[[], object]) -> Future[object]:
    workers = ThreadPoolExecutor(1)
    future = workers.submit(work)
    workers.shutdown(wait=False)
    return future


def by_event(work: Callable[[], object]) -> None:
    done = threading.Event()
    in_a_thread(lambda: (work(), done.set()))
    assert done.wait(30)


def by_queue(work: Callable[[], object]) -> None:
    done: Queue[object] = Queue()
    in_a_thread(lambda: done.put(work()))
    done.get(timeout=30)


def by_polling(work: Callable[[], object]) -> None:
    thread = in_a_thread(work)
    while thread.is_alive():
        time.sleep(0.01)


def by_a_lock(work: Callable[[], object]) -> None:
    lock = threading.Lock()
    lock.acquire()
    in_a_thread(lambda: (work(), lock.release()))
    assert lock.acquire(timeout=30)


def by_the_end_of_the_workers(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(2) as workers:
        workers.submit(work)


def by_a_thread_of_a_thread(work: Callable[[], object]) -> None:
    in_a_thread(lambda: in_a_thread(work).join()).join()


class Waiting(threading.Thread):
    """A thread that is a class, and whose work comes late."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work

    def run(self) -> None:
        time.sleep(0.02)
        self.work()


def as_a_class(work: Callable[[], object]) -> None:
    thread = Waiting(work)
    thread.start()
    thread.join()


WAITS: dict[str, Callable[[Callable[[], object]], object]] = {
    "join": lambda work: in_a_thread(work).join(),
    "result": lambda work: submitted(work).result(),
    "wait": lambda work: wait([submitted(work)]),
    "as completed": lambda work: [*as_completed([submitted(work)])],
    "event": by_event,
    "queue": by_queue,
    "polling": by_polling,
    "lock": by_a_lock,
    "with": by_the_end_of_the_workers,
    "thread of a thread": by_a_thread_of_a_thread,
    "class": as_a_class,
}
LEAVES: dict[str, Callable[[Callable[[], object]], object]] = {
    "thread": in_a_thread,
    "future": submitted,
    "asks once": lambda work: in_a_thread(work).is_alive(),
    "waits for another": lambda work: (in_a_thread(work), in_a_thread(lambda: None).join()),
    "an earlier result": lambda work: (submitted(lambda: None).result(), submitted(work)),
    "another result": lambda work: (submitted(work), submitted(lambda: None).result()),
    "an earlier event": lambda work: (by_event(lambda: None), in_a_thread(work)),
    "sleeps": lambda work: (in_a_thread(work), time.sleep(0.05)),
}


class Threaded(Pool):
    """Saves, loads, or both in another thread."""

    def __init__(self, how: Callable[[Callable[[], object]], object], calls: str = "load") -> None:
        super().__init__()
        self.how, self.calls = how, calls

    def save(self, ids: Any) -> Any:
        copy = [each.new_zeros(each[ids].shape) for each in self.buffers()]

        def work() -> None:
            for rows, each in zip(copy, self.buffers(), strict=True):
                rows.copy_(each[ids])

        self.how(work) if "save" in self.calls else work()
        return copy

    def load(self, copy: Any, ids: Any) -> None:
        def work() -> None:
            super(Threaded, self).load(copy, ids)

        self.how(work) if "load" in self.calls else work()


@pytest.mark.parametrize("way", WAITS)
def test_a_wait_of_any_kind_is_green_and_no_thread_is_left(way: str) -> None:
    before = set(threading.enumerate())
    result = judged(Threaded(WAITS[way], "save, load"))
    assert ["more than" in each for each in result.not_tried] == [True] * 2 * (way in ("polling", "lock"))
    assert min(result.words.values()) > 0
    assert not [each for each in threading.enumerate() if each not in before and not each.join(5) and each.is_alive()]


@pytest.mark.parametrize("way", LEAVES)
def test_a_load_that_returns_before_its_thread_has_run_is_found_each_time(way: str) -> None:
    for seed in (0, 1):
        findings = found(Threaded(LEAVES[way]), seed=seed).findings
        causes = [each for each in findings if each.cause is None]
        assert {each.code for each in findings} <= {"KV304", "KV102"} and {each.code for each in causes} == {"KV304"}
        assert all("load returned" in each.message and "exclude" not in each.message for each in causes)


def test_a_load_that_leaves_a_part_to_a_thread_names_that_part() -> None:
    class Half(Pool):
        def load(self, copy: Any, ids: Any) -> None:
            for each, rows in [*zip(self.buffers(), copy, strict=True)][:-1]:
                each[ids] = rows
            threading.Thread(target=self.k_scale[1].__setitem__, args=(ids, copy[-1])).start()

    (finding,) = (each for each in found(Half()).findings if each.cause is None)
    assert (finding.code, finding.buffer, finding.layer) == ("KV304", "k_scale", 1)
    assert "load returned" in finding.message


def test_one_event_for_two_threads_is_a_note() -> None:
    result = judged(Threaded(lambda work: (in_a_thread(work).join, by_event(lambda: time.sleep(0.2)))))
    assert any("no thread and no future" in each for each in result.not_tried)


@pytest.mark.parametrize("way", ["thread", "future"])
def test_a_save_that_returns_before_its_thread_has_run_is_named_and_its_copy_awaited(way: str) -> None:
    (told,) = judged(Threaded(LEAVES[way], "save")).not_tried
    assert told.startswith("save: work in another thread had not run when it returned")


class WithWorker(Pool):
    """A thread that takes its work from a queue, and was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Queue[Any] = Queue()
        self.worker = in_a_thread(lambda: [work() for work in iter(self.work.get, None)])

    def load(self, copy: Any, ids: Any) -> None:
        done = threading.Event()
        self.work.put(lambda: (super(WithWorker, self).load(copy, ids), done.set()))
        assert done.wait(30)


def test_a_thread_that_was_there_before_is_named() -> None:
    pool = WithWorker()
    (told,) = judged(pool).not_tried
    pool.work.put(None)
    pool.worker.join(30)
    assert "(worker)" in told and told.startswith("save, load")


def test_an_error_of_the_call_stays_and_lets_its_threads_go() -> None:
    ran = threading.Event()

    class Raises(Pool):
        def load(self, copy: Any, ids: Any) -> None:
            in_a_thread(ran.set)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        judged(Raises())
    assert ran.wait(30) and threading.Thread.start.__module__ == "threading"
