"""Cell workers: run cells in child processes that report one JSON line for each schedule.

Invariants:
- A child that dies is a finding (KV902) of the cells that it was running. The run continues.
- Children speak JSON lines over a pipe; nothing is unpickled.
"""

from __future__ import annotations

import json
import queue
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvcheck.core.base.child import Streams, close_input, end, listen, start, tell
from kvcheck.core.base.errors import InternalError, TargetError, UnknownVerdict, UsageError
from kvcheck.core.base.record import Evidence, to_plain, value_from
from kvcheck.core.stress.cell_task import CellTask, Limit, Report
from kvcheck.core.stress.runner_rows import TargetOf
from kvcheck.core.stress.schedule import parse_line
from kvcheck.core.stress.turns import take_turns

LATE_S = 2.0
"""A child keeps the limit of wall time itself; so long after it, it is ended."""
ENDING_S = 0.3
"""What a child has for taking its temporary folders away, before it is killed."""
BEGUN = '{"begun": true}'
"""What a worker says when all is loaded: from now on its death is that of what is under test."""


def run_in_workers(tasks: Sequence[CellTask], jobs: int, limit: Limit, worker: str) -> Iterator[Report]:
    """Run all cells in so many processes. worker: the module that each process runs; it calls work()."""
    messages: queue.Queue[tuple[int, str | None]] = queue.Queue()
    shares = [list(range(start, len(tasks), jobs)) for start in range(min(jobs, len(tasks)))]
    texts = [tasks_text([(n, tasks[n]) for n in share], limit) for share in shares]
    children = [_start(worker, text, index, messages) for index, text in enumerate(texts)]
    open_cells = [set(share) for share in shares]
    begun: set[int] = set()
    running = len(children)
    try:
        while running:
            try:
                index, line = messages.get(timeout=_patience_s(limit))
            except queue.Empty:
                for cell in sorted(set().union(*open_cells)):
                    yield Report(cell=cell, cut="--max-time ended the process that ran it")
                return
            if line is not None:
                if line.strip() == BEGUN:
                    begun.add(index)
                    continue
                report = _decode(line)
                if report.error is not None:
                    yield from _failed(report, open_cells[index])
                    continue
                if report.evidence is None:
                    open_cells[index].discard(report.cell)
                yield report
                continue
            running -= 1
            code = children[index].wait()
            why = f"the process that ran it ended with status {code}"
            exit_code = TargetError.exit_code
            if index not in begun:
                why, exit_code = f"{why} while kvcheck was loaded, before its first schedule", UnknownVerdict.exit_code
            yield from _failed(Report(error=why, exit_code=exit_code), open_cells[index])
    finally:
        end(*children, within_s=ENDING_S)  # SIGTERM first, so that they remove their temporary folders


def _failed(report: Report, open_cells: set[int]) -> Iterator[Report]:
    """End reports for the cells that a process has not finished, from its death or from its last line, which says why
    it stopped.

    Raises UsageError or InternalError if the process has raised one, as a run in this process would.
    """
    if report.exit_code == UsageError.exit_code:
        raise UsageError(str(report.error))
    if report.exit_code == InternalError.exit_code:
        raise InternalError(str(report.error))
    for cell in sorted(open_cells):
        yield replace(report, cell=cell)
    open_cells.clear()


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
    """Tasks as JSON."""
    rows = [
        {"cell": number, "line": task.plan.line(), "task": {**_plain(task), "plan": None}} for number, task in share
    ]
    return json.dumps({"limit": to_plain(limit), "cells": rows})


def _plain(task: CellTask) -> dict[str, object]:
    plain = to_plain(task)
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def work(text: str, target_of: TargetOf) -> Iterator[str]:
    """Run in a child: read tasks as JSON, write reports as JSON lines."""
    asked = json.loads(text)
    limit: Limit = value_from(Limit, asked["limit"], "limit")
    share = []
    for row in asked["cells"]:
        values = {**row["task"], "plan": parse_line(row["line"])}
        values["before"] = value_from(Evidence, values["before"], "before")
        share.append((row["cell"], CellTask(**values)))
    for report in take_turns(share, limit, target_of):
        yield report.line()


def _decode(line: str) -> Report:
    report: Report = value_from(Report, json.loads(line), "report")
    return report
