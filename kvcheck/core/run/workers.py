"""Workers: child processes that run cells, or answer one question after another, in lines of JSON.

Invariants:
- A child that dies is a finding (KV902) of its running schedule. Before its first one, it is UNKNOWN.
- Cells of a child that has died or lost its device go on in a new one. No judged schedule runs again.
- A question is never repeated, also if its process died.
"""

from __future__ import annotations

import json
import queue
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvcheck.core.base.child import StandardStreams, close_input, end, listen, start, tell
from kvcheck.core.base.errors import InternalError, KvcheckError, TargetError, UnknownVerdict, UsageError
from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.run.outcome import TargetOf, complete
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import DIED, CellTask, Limit, Report, take_turns

LATE_S = 2.0
"""A child keeps the limit of wall time itself; it is ended this long after it."""
ENDING_S = 0.3
"""Time for a child to remove its temporary folders, before it is killed."""
BEGUN = '{"begun": true}'
"""First line of a worker, after loading: from now on its death counts against the code under test."""
BEGINS = {"cell", "begins"}
"""Keys of a worker's line before each schedule: its cell and its line."""
TOLD = {"told"}
"""Keys of its lines before an answer."""


class Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.has_begun = False

    def tell(self, text: str) -> None:
        tell(self.process, text)

    def close_input(self) -> None:
        close_input(self.process)

    def wait(self) -> int:
        return self.process.wait()


class Workers:
    """A pool of processes of one program. kind: the argument of each; None: it runs cells."""

    def __init__(self, program: str, kind: str | None = None) -> None:
        self._program, self._arguments = program, () if kind is None else (kind,)
        self._lines: queue.SimpleQueue[tuple[Worker, str | None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []

    def start(self) -> Worker:
        streams = StandardStreams(stdin=subprocess.PIPE)
        worker = Worker(start(self._program, *self._arguments, streams=streams, variables={"OMP_NUM_THREADS": "1"}))
        self._workers.append(worker)
        listen(worker.process, lambda line: self._lines.put((worker, line)))
        return worker

    def take(self, until: float | None) -> tuple[Worker, str | None] | None:
        """Return a worker and its next line, or None at the end of its output. Return None if all took longer than
        LATE_S after `until`, a time.monotonic()."""
        while True:
            try:
                late_s = None if until is None else max(0.0, until + LATE_S - time.monotonic())
                worker, line = self._lines.get(timeout=late_s)
            except queue.Empty:
                return None
            if line is None or line.strip() != BEGUN:
                return worker, line
            worker.has_begun = True

    def close(self) -> None:
        end(*(worker.process for worker in self._workers), within_s=ENDING_S)
        for worker in self._workers:
            worker.close_input()
        self._workers.clear()


def failure(exit_code: object, text: object) -> KvcheckError:
    kinds: dict[object, type[KvcheckError]] = {2: UsageError, 4: UnknownVerdict}
    return kinds.get(exit_code, InternalError)(str(text))


class Unanswered(Exception):
    """died: the status in words; None for a timeout."""

    def __init__(self, died: str | None) -> None:
        super().__init__(died or "its time was over")
        self.died = died


class AskedProcess:
    """A worker that answers questions. A question starts it, again after `close`."""

    def __init__(self, program: str, kind: str) -> None:
        self._program, self._kind = program, kind
        self._pool = Workers(program, kind)
        self._worker: Worker | None = None

    def ask(
        self, question: object, *, until: float | None = None, told: Callable[[object], None] = lambda row: None
    ) -> object:
        """Send a question and return the answer. until: a time.monotonic(). Raises Unanswered; the error of the
        process; and UnknownVerdict if it never began."""
        worker = self._worker = self._worker or self._pool.start()
        worker.tell(json.dumps(to_plain(question)))
        while (event := self._pool.take(until)) is not None:
            line = event[1]
            if line is None:
                why = f"the process that judged it ended with status {worker.wait()}"
                if not worker.has_begun:
                    raise UnknownVerdict(f"{why} while kvcheck was loaded, before it was asked anything")
                raise Unanswered(why)
            said = json.loads(line)
            if said.get("error") is not None:
                raise failure(said["exit_code"], said["error"])
            if said.keys() != TOLD:
                return said
            told(said["told"])
        raise Unanswered(None)

    def close(self) -> None:
        self._pool.close()
        self._pool, self._worker = Workers(self._program, self._kind), None


def run_in_workers(
    tasks: Sequence[CellTask], shares: Iterable[Iterable[int]], limit: Limit, worker: str, beside: Sequence[int] = ()
) -> Iterator[Report]:
    """Run each share of the cells in a process.

    worker: the module that calls work(). beside: tasks of one more process, which begins once another cell has run up
    to its floor, so as not to delay the first verdict.
    """
    pool = Workers(worker)
    children: dict[Worker, CellsChild] = {}

    def begin(share: dict[int, CellTask], within: Limit) -> None:
        process = pool.start()
        process.tell(tasks_text([*share.items()], within))
        process.close_input()
        children[process] = CellsChild(process, share, within)

    try:
        for share in shares:
            begin({number: tasks[number] for number in share}, limit)
        while (running := [child for child in children.values() if child.is_running]) or beside:
            if beside and (not running or any(map(CellsChild.has_come_far, children.values()))):
                begin({number: tasks[number] for number in beside}, limit)
                beside = ()
            event = pool.take(limit.until)
            if event is None:
                for cell in sorted([*beside, *(cell for child in children.values() for cell in child.cells)]):
                    yield Report(cell=cell, cut="--max-time ended the process that ran it")
                return
            child = children[event[0]]
            if event[1] is not None:
                yield from child.takes(event[1])
                continue
            yield from child.ends()
            if child.cells:
                begin(child.cells, child.left)
    finally:
        pool.close()


class CellsChild:
    def __init__(self, worker: Worker, cells: dict[int, CellTask], limit: Limit) -> None:
        self._worker = worker
        self.cells = dict(cells)
        self.is_running = True
        self.left = limit
        self._has_failed = self._has_ended_one = False
        self._lost_in: int | None = None
        self._now: tuple[int, str] | None = None

    def has_come_far(self) -> bool:
        return self._has_ended_one or any(task.before.schedules >= task.floor for task in self.cells.values())

    def takes(self, line: str) -> Iterator[Report]:
        told = json.loads(line)
        if told.keys() == BEGINS:
            self._now = told["cell"], told["begins"]
            return
        report: Report = value_from(Report, told, "report")
        if report.error is not None:
            yield from self._failed(report)
            return
        self._now, task = None, self.cells[report.cell]
        if self.left.cpu_s is not None:
            self.left = replace(self.left, cpu_s=max(0.0, self.left.cpu_s - report.duration_s))
        if report.evidence is not None:
            self.cells[report.cell] = replace(task, before=task.before.plus(report.evidence))
        elif report.is_left:
            self.cells[report.cell] = replace(task, is_exercised=report.reason is None)
        else:
            del self.cells[report.cell]
            self._has_ended_one = True
        if report.is_device_lost:
            self._lost_in, self.left = report.cell, replace(self.left, cpu_s=report.left_cpu_s)
        yield report

    def ends(self) -> Iterator[Report]:
        """After a lost device, the exit status is no verdict on the cells that are left."""
        self.is_running = False
        code = self._worker.wait()
        if self._has_failed:
            return
        if self._lost_in is not None:
            if self.cells.pop(self._lost_in, None) is not None:  # it died before it could report this
                yield Report(cell=self._lost_in)
            return
        why = f"the process that ran it ended with status {code}"
        exit_code = TargetError.exit_code
        if not self._worker.has_begun:
            why, exit_code = f"{why} while kvcheck was loaded, before its first schedule", UnknownVerdict.exit_code
        yield from self._failed(Report(error=why, exit_code=exit_code))

    def _failed(self, report: Report) -> Iterator[Report]:
        self._has_failed = True
        if report.exit_code in (UsageError.exit_code, InternalError.exit_code):
            raise failure(report.exit_code, report.error)
        now, line = (None, None) if self._now is None else self._now
        for cell in sorted(self.cells) if now is None else [now]:
            del self.cells[cell]
            yield replace(report, cell=cell, ran=line)


def died(plan: Plan, report: Report) -> Finding:
    plan = plan if report.ran is None else parse_line(report.ran)
    message = f"{plan.cell}: {report.error}"
    return complete(Finding(code="KV902", oracle="liveness", message=message, minimal={DIED: True}), plan)


def tasks_text(share: Sequence[tuple[int, CellTask]], limit: Limit) -> str:
    rows = [
        {"cell": number, "line": task.plan.line(), "task": {**_plain(task), "plan": None}} for number, task in share
    ]
    return json.dumps({"limit": to_plain(limit), "cells": rows})


def _plain(task: CellTask) -> dict[str, object]:
    plain = to_plain(task)
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def work(text: str, target_of: TargetOf, say: Callable[[str], None]) -> Iterator[str]:
    """Run in a child: read tasks as JSON, return reports as JSON lines."""
    asked = json.loads(text)
    limit: Limit = value_from(Limit, asked["limit"], "limit")
    share = []
    for row in asked["cells"]:
        values = {**row["task"], "plan": parse_line(row["line"])}
        values["before"] = value_from(Evidence, values["before"], "before")
        share.append((row["cell"], CellTask(**values)))

    def begins(cell: int, plan: Plan) -> None:
        say(json.dumps({"cell": cell, "begins": plan.line()}))

    for report in take_turns(share, limit, target_of, begins=begins):
        yield report.line()
