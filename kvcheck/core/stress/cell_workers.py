"""Cell workers: run cells in child processes that report one JSON line for each schedule.

Invariants:
- A child that dies is a finding (KV902) of its running schedule. Before its first one, it is UNKNOWN.
- Cells of a child that has died or lost its device go on in a new one. No judged schedule runs again.
"""

from __future__ import annotations

import json
import queue
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvcheck.core.base.child import Streams, close_input, end, listen, start, tell
from kvcheck.core.base.errors import InternalError, TargetError, UnknownVerdict, UsageError
from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.stress.cell_task import DIED, CellTask, Limit, Report
from kvcheck.core.stress.runner import complete
from kvcheck.core.stress.runner_rows import TargetOf
from kvcheck.core.stress.schedule import Plan, parse_line
from kvcheck.core.stress.turns import take_turns

LATE_S = 2.0
"""A child keeps the limit of wall time itself; it is ended this long after it."""
ENDING_S = 0.3
"""Time for a child to remove its temporary folders, before it is killed."""
BEGUN = '{"begun": true}'
"""First line of a worker, after loading: from now on its death counts against the code under test."""
BEGINS = {"cell", "begins"}
"""Keys of a worker's line before each schedule: its cell and its line."""


def run_in_workers(
    tasks: Sequence[CellTask], shares: Iterable[Iterable[int]], limit: Limit, worker: str, beside: Sequence[int] = ()
) -> Iterator[Report]:
    """Run each share of the cells in a process.

    shares: numbers of tasks. worker: the module that each process runs; it calls work(). beside: tasks of one more
    process, which begins once another cell has run up to its floor, so as not to delay the first verdict.
    """
    messages: queue.Queue[tuple[int, str | None]] = queue.Queue()
    children: list[_Child] = []

    def begin(share: dict[int, CellTask], within: Limit) -> None:
        process = _start(worker, tasks_text([*share.items()], within), len(children), messages)
        children.append(_Child(process, share, within))

    try:
        for share in shares:
            begin({number: tasks[number] for number in share}, limit)
        while beside or any(child.is_running for child in children):
            if beside and (any(map(_Child.has_come_far, children)) or not any(each.is_running for each in children)):
                begin({number: tasks[number] for number in beside}, limit)
                beside = ()
            try:
                index, line = messages.get(timeout=_patience_s(limit))
            except queue.Empty:
                for cell in sorted([*beside, *(cell for child in children for cell in child.cells)]):
                    yield Report(cell=cell, cut="--max-time ended the process that ran it")
                return
            child = children[index]
            if line is not None:
                yield from child.takes(line)
                continue
            yield from child.ends()
            if child.cells:
                begin(child.cells, child.left)
    finally:
        end(*(each.process for each in children), within_s=ENDING_S)  # SIGTERM first: they remove temporary folders


class _Child:
    """cells: its open tasks. left: the rest of its limit."""

    def __init__(self, process: subprocess.Popen[str], cells: dict[int, CellTask], limit: Limit) -> None:
        self.process = process
        self.cells = dict(cells)
        self.is_running = True
        self.left = limit
        self._has_begun = self._has_failed = self._has_ended_one = False
        self._lost_in: int | None = None
        self._now: tuple[int, str] | None = None

    def has_come_far(self) -> bool:
        return self._has_ended_one or any(task.before.schedules >= task.floor for task in self.cells.values())

    def takes(self, line: str) -> Iterator[Report]:
        if line.strip() == BEGUN:
            self._has_begun = True
            return
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
        code = self.process.wait()
        if self._has_failed:
            return
        if self._lost_in is not None:
            if self.cells.pop(self._lost_in, None) is not None:  # it died before it could report this
                yield Report(cell=self._lost_in)
            return
        why = f"the process that ran it ended with status {code}"
        exit_code = TargetError.exit_code
        if not self._has_begun:
            why, exit_code = f"{why} while kvcheck was loaded, before its first schedule", UnknownVerdict.exit_code
        yield from self._failed(Report(error=why, exit_code=exit_code))

    def _failed(self, report: Report) -> Iterator[Report]:
        """Reports of the end of the running cell, else of all open ones.

        Raises UsageError or InternalError if the process has raised one.
        """
        self._has_failed = True
        if report.exit_code == UsageError.exit_code:
            raise UsageError(str(report.error))
        if report.exit_code == InternalError.exit_code:
            raise InternalError(str(report.error))
        now, line = (None, None) if self._now is None else self._now
        for cell in sorted(self.cells) if now is None else [now]:
            del self.cells[cell]
            yield replace(report, cell=cell, ran=line)


def died(plan: Plan, report: Report) -> Finding:
    plan = plan if report.ran is None else parse_line(report.ran)
    message = f"{plan.cell}: {report.error}"
    return complete(Finding(code="KV902", oracle="liveness", message=message, minimal={DIED: True}), plan)


def _patience_s(limit: Limit) -> float | None:
    return None if limit.until is None else max(0.0, limit.until + LATE_S - time.monotonic())


def _start(worker: str, text: str, index: int, messages: queue.Queue[tuple[int, str | None]]) -> subprocess.Popen[str]:
    streams = Streams(stdin=subprocess.PIPE)
    child = start(worker, streams=streams, variables={"OMP_NUM_THREADS": "1"})
    tell(child, text)
    close_input(child)
    listen(child, lambda line: messages.put((index, line)))
    return child


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
    """Run in a child: read tasks as JSON, return reports as JSON lines. say: writes a line before each schedule."""
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
