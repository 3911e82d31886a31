"""Crews: where batches run, and the fate of a batch whose process died.

Invariants:
- At most as many batches are under way as the crew has places. A batch has one result.
- A batch whose process died runs again, in another process. One that has ended LOSSES processes is a finding (KV902).
- A process with another kvcheck has no results: the run ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.identity import code_digest, short
from kvcheck.core.base.record import Evidence
from kvcheck.core.stress.asked_process import AskedProcess, Unanswered
from kvcheck.core.stress.cell_task import Report
from kvcheck.core.stress.cell_workers import LATE_S, died
from kvcheck.core.stress.schedule import parse_line
from kvcheck.core.stress.seeds.batches import BATCHES, BatchResult, BatchTask, result_of

LOSSES = 3
"""Processes that a batch may end, before its death is that of what is under test."""


class Lost(Exception):
    """The process of a batch ended without a result. ran: the line of its last schedule; None: kvcheck was not loaded
    yet."""

    def __init__(self, why: str, ran: str | None) -> None:
        super().__init__(why)
        self.ran = ran


class Crew(Protocol):
    """Runs batches, `places` at once."""

    places: int

    def begin(self, task: BatchTask) -> Future[Any]:
        """Begin a batch."""

    def result(self, future: Future[Any], task: BatchTask) -> BatchResult | None:
        """The result of a batch that has ended; None where the time cut it. Raises Lost, or the error of its worker."""

    def close(self) -> None:
        """End all that is under way."""


def results(tasks: Iterable[BatchTask], crew: Crew, *, until: float | None) -> Iterator[BatchResult]:
    """The results of batches, as they come. until: the time.monotonic() at which all ends."""
    left = iter(tasks)
    again: list[BatchTask] = []
    losses: dict[str, int] = {}
    under_way: dict[Future[Any], BatchTask] = {}
    while True:
        while len(under_way) < crew.places and (until is None or time.monotonic() < until):
            task = again.pop() if again else next(left, None)
            if task is None:
                break
            left_s = None if until is None else max(0.0, until - time.monotonic())
            under_way[crew.begin(dataclasses.replace(task, left_s=left_s))] = task
        if not under_way:
            return
        late_s = None if until is None else max(0.0, until + LATE_S - time.monotonic())
        ended, _ = wait(under_way, timeout=late_s, return_when=FIRST_COMPLETED)
        if not ended:
            return
        for future in ended:
            task = under_way.pop(future)
            try:
                result = crew.result(future, task)
            except Lost as loss:
                losses[task.line] = losses.get(task.line, 0) + 1
                if losses[task.line] < LOSSES:
                    again.append(task)
                else:
                    yield _died(task, loss)
                continue
            if result is not None:
                yield _checked(result)


def _checked(result: BatchResult) -> BatchResult:
    """The result, if it is of this kvcheck. Raises UnknownVerdict."""
    if result.code != code_digest():
        raise UnknownVerdict(
            f"a worker runs another kvcheck: its code is {short(result.code)}, and {short(code_digest())} here; "
            "install one version on all machines"
        )
    return result


def _died(task: BatchTask, loss: Lost) -> BatchResult:
    """The result of a batch that ends every process that runs it. Raises UnknownVerdict if none has begun it."""
    if loss.ran is None:
        raise UnknownVerdict(f"{LOSSES} processes ended while kvcheck was loaded in them; the last one: {loss}")
    error = f"{LOSSES} processes that ran it have ended; the last one: {loss}"
    finding = died(parse_line(task.line), Report(error=error, ran=loss.ran))
    return BatchResult(line=task.line, code=code_digest(), evidence=Evidence(schedules=1), findings=(finding,))


class Processes:
    """Runs batches in so many processes of this machine. program: the module that each of them runs."""

    def __init__(self, places: int, program: str) -> None:
        self.places = places
        self._all = [AskedProcess(program, BATCHES) for _ in range(places)]
        self._idle = [*self._all]
        self._threads = ThreadPoolExecutor(places)

    def begin(self, task: BatchTask) -> Future[Any]:
        process = self._idle.pop()
        process.begin(task)  # in this thread, so that close() ends each process that was started
        return self._threads.submit(self._answer, process, task.line)

    def result(self, future: Future[Any], task: BatchTask) -> BatchResult | None:
        return result_of(future.result())

    def close(self) -> None:
        for process in self._all:
            process.close()
        self._threads.shutdown()

    def _answer(self, process: AskedProcess, ran: str) -> dict[str, object]:
        def begins(line: object) -> None:
            nonlocal ran
            ran = str(line)

        try:
            return process.answer(told=begins)
        except Unanswered as why:
            raise Lost(str(why), ran) from why
        except UnknownVerdict as why:
            if process.has_begun:
                raise
            raise Lost(str(why), None) from why
        finally:
            self._idle.append(process)
