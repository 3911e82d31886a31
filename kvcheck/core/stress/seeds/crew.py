"""Crews: processes that run batches, and the fate of a batch whose process died.

Invariants:
- A batch whose process died runs again, in another process. One that has ended LOSSES processes is a finding (KV902).
- A process with another kvcheck has no results: the run ends.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.identity import code_digest, short
from kvcheck.core.base.record import Evidence, to_plain
from kvcheck.core.run.plan import parse_line
from kvcheck.core.run.turns import Report
from kvcheck.core.run.workers import TOLD, Worker, Workers, died
from kvcheck.core.stress.seeds.batches import BATCHES, BatchResult, BatchTask, result_of

LOSSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """result: None if the time cut it. lost: why its process ended without a result. ran: the line of its last
    schedule; None: kvcheck was not loaded yet."""

    task: BatchTask
    result: BatchResult | None = None
    lost: str | None = None
    ran: str | None = None


class Crew(Protocol):
    places: int

    def begin(self, task: BatchTask) -> None: ...

    def take(self, until: float | None) -> Ended | None:
        """The next batch; None if none ended a while after `until`, a time.monotonic(). Raises the worker's error."""

    def close(self) -> None: ...


def results(tasks: Iterable[BatchTask], crew: Crew, *, until: float | None) -> Iterator[BatchResult]:
    """Yield results as batches end. until: the time.monotonic() at which all ends."""
    left = iter(tasks)
    again: list[BatchTask] = []
    losses: dict[str, int] = {}
    under_way = 0
    while True:
        while under_way < crew.places and (until is None or time.monotonic() < until):
            task = again.pop() if again else next(left, None)
            if task is None:
                break
            crew.begin(dataclasses.replace(task, left_s=None if until is None else until - time.monotonic()))
            under_way += 1
        ended = crew.take(until) if under_way else None
        if ended is None:
            return
        under_way -= 1
        line = ended.task.line
        if ended.lost is not None:
            losses[line] = losses.get(line, 0) + 1
            if losses[line] < LOSSES:
                again.append(ended.task)
            else:
                yield _died(ended)
        elif ended.result is not None:
            yield _checked(ended.result)


def _checked(result: BatchResult) -> BatchResult:
    if result.code != code_digest():
        raise UnknownVerdict(
            f"a worker runs another kvcheck: its code is {short(result.code)}, and {short(code_digest())} here; "
            "install one version on all machines"
        )
    return result


def _died(ended: Ended) -> BatchResult:
    if ended.ran is None:
        raise UnknownVerdict(f"{LOSSES} processes ended while kvcheck was loaded in them; the last one: {ended.lost}")
    line, error = ended.task.line, f"{LOSSES} processes that ran it have ended; the last one: {ended.lost}"
    finding = died(parse_line(line), Report(error=error, ran=ended.ran))
    return BatchResult(line=line, code=code_digest(), evidence=Evidence(schedules=1), findings=(finding,))


class Processes:
    def __init__(self, places: int, program: str) -> None:
        self.places = places
        self._pool = Workers(program, BATCHES)
        self._idle: list[Worker] = []
        self._running: dict[Worker, tuple[BatchTask, str]] = {}  # with the line of its last schedule

    def begin(self, task: BatchTask) -> None:
        worker = self._idle.pop() if self._idle else self._pool.start()
        self._running[worker] = task, task.line
        worker.tell(json.dumps(to_plain(task)))

    def take(self, until: float | None) -> Ended | None:
        while (event := self._pool.take(until)) is not None:
            worker, line = event
            if worker not in self._running:  # it has died between two batches
                self._idle.remove(worker)
                continue
            task, ran = self._running[worker]
            if line is not None and (row := json.loads(line)).keys() == TOLD:
                self._running[worker] = task, row["told"]
                continue
            del self._running[worker]
            if line is not None:
                self._idle.append(worker)
                return Ended(task=task, result=result_of(line))
            lost = f"it ended with status {worker.wait()}"
            return Ended(task=task, lost=lost, ran=ran if worker.has_begun else None)
        return None

    def close(self) -> None:
        self._pool.close()
