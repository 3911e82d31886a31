"""Crews: processes that run the batches of a campaign, and the handling of a batch whose process died.

Invariants:
- At most `places` batches run at once. A result is yielded once.
- A batch whose process died runs again, in another process. One that has ended LOSSES processes is a finding (KV902).
- A process with another kvcheck has no results: the campaign ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.identity import code_digest, short
from kvcheck.core.base.record import Evidence, Finding
from kvcheck.core.run.workers import Worker, Workers, failure
from kvcheck.core.stress.campaign.batches import Batch, BatchResult, parse_result, run_batch
from kvcheck.core.stress.runner import TargetOf

LOSSES = 3
"""Processes that a batch may end before its death is a finding."""
BATCHES = "batches"
"""The argument with which a worker takes batches, one a line, until its input ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A batch that ended. result: None if the time was up before its end."""

    batch: Batch
    result: BatchResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A batch whose process ended without a result. has_begun: kvcheck was loaded in it."""

    batch: Batch
    why: str
    has_begun: bool = True


class Crew(Protocol):
    places: int

    def give(self, batch: Batch, until: float | None) -> None:
        """Begin a batch. until: the time.monotonic() at which it ends."""

    def take(self, until: float | None) -> Done | Lost | None:
        """Return the next batch that has ended; None if none did until some time after `until`."""

    def close(self) -> None:
        """End all running batches."""


def results(
    batches: Iterable[Batch], crew: Crew, *, until: float | None, is_enough: Callable[[], bool]
) -> Iterator[BatchResult]:
    """Yield results in order of completion. is_enough: called before each batch; True ends the start of batches."""
    left = iter(batches)
    again: list[Batch] = []
    lost: dict[str, int] = {}
    under_way = 0
    is_over = False
    while True:
        while not is_over and under_way < crew.places:
            is_over = (until is not None and time.monotonic() >= until) or is_enough()
            batch = None if is_over else again.pop() if again else next(left, None)
            if batch is None:
                break
            crew.give(batch, until)
            under_way += 1
        if not under_way:
            return
        event = crew.take(until)
        if event is None:
            return
        under_way -= 1
        if isinstance(event, Lost):
            line = event.batch.line
            lost[line] = lost.get(line, 0) + 1
            if lost[line] < LOSSES:
                again.append(event.batch)
            elif not event.has_begun:
                raise UnknownVerdict(
                    f"{LOSSES} processes ended while kvcheck was loaded in them; the last one: {event.why}"
                )
            else:
                yield died(event.batch, event.why)
        elif event.result is not None:
            yield checked(event.result)


def checked(result: BatchResult) -> BatchResult:
    """Return the result. Raises UnknownVerdict if it is of another kvcheck."""
    if result.code != code_digest():
        raise UnknownVerdict(
            f"a worker runs another kvcheck: its code is {short(result.code)}, and {short(code_digest())} here; "
            "install one version on all machines"
        )
    return result


def died(batch: Batch, why: str) -> BatchResult:
    """Make the result of a batch that ends every process that runs it."""
    plan = batch.plan
    finding = Finding(
        code="KV902",
        oracle="liveness",
        scenario=plan.scenario,
        shape=plan.tried_with,
        message=f"{plan.cell}: {LOSSES} processes that ran the batch {batch.line} died, the last one: {why}",
    )
    return BatchResult(
        at=batch.at,
        line=batch.line,
        within=batch.within,
        code=code_digest(),
        evidence=Evidence(schedules=1),
        findings=(finding,),
    )


class OwnProcess:
    places = 1

    def __init__(self, target_of: TargetOf) -> None:
        self._target_of = target_of
        self._done: list[Done] = []

    def give(self, batch: Batch, until: float | None) -> None:
        self._done.append(Done(batch=batch, result=run_batch(batch, until=until, target_of=self._target_of)))

    def take(self, until: float | None) -> Done:
        return self._done.pop()

    def close(self) -> None: ...


class Children:
    """Runs batches in child processes of this machine. program: the module that each of them runs."""

    def __init__(self, places: int, program: str) -> None:
        self.places = places
        self._pool = Workers(program, BATCHES)
        self._batches: dict[Worker, Batch | None] = {}

    def give(self, batch: Batch, until: float | None) -> None:
        worker = next((each for each, run in self._batches.items() if run is None), None) or self._pool.start()
        self._batches[worker] = batch
        worker.tell(batch.text(None if until is None else max(0.0, until - time.monotonic())))

    def take(self, until: float | None) -> Done | Lost | None:
        while (event := self._pool.take(until)) is not None:
            worker, line = event
            batch = self._batches.pop(worker)
            if line is not None:
                self._batches[worker] = None
            if batch is None:
                continue
            if line is None:
                return Lost(batch=batch, why=f"it ended with status {worker.wait()}", has_begun=worker.has_begun)
            return Done(batch=batch, result=told(line))
        return None

    def close(self) -> None:
        self._pool.close()


def told(line: str) -> BatchResult | None:
    """Parse a worker's line; None if its time was up. Raises the error that the worker reported."""
    row = json.loads(line)
    if row.get("error") is not None:
        raise failure(row["exit_code"], row["error"])
    text = row["result"]
    return None if text == "" else parse_result(text)


def telling(text: str) -> str:
    """Format a result as a worker's line, "" for none."""
    return json.dumps({"result": text, "error": None})
