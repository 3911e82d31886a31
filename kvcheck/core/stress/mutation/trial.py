"""Trial: what a forked process does for one order, such as judging one mutant; and the answers it gives.

Invariants:
- The edited code is compared with reference outputs of the code as it is, never with its own.
- A schedule runs under the plan of a default run, so a kill is a line that `kvcheck replay` takes.
- CPU seconds are counted by this process alone. They end a trial and decide no verdict, but for an endless loop.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from kvcheck.core.base.deadline import LOOK_AGAIN_S, would_be_lost
from kvcheck.core.base.errors import InternalError, KvcheckError, machine_trouble
from kvcheck.core.base.record import Finding
from kvcheck.core.stress.mutation.edits import CACHE
from kvcheck.core.stress.mutation.reach import LineTrace
from kvcheck.core.stress.runner import Outcome, ScheduleRunner, Workloads
from kvcheck.core.stress.schedule import Plan, parse_line, workload_seed
from kvcheck.core.targets import TARGETS

Say = Callable[[dict[str, object]], None]

SURVEY_CPU_S = 600.0


class Endless(BaseException):
    """A schedule used far more CPU time than its cell needs."""


def survey(folder: Path, order: Mapping[str, object], say: Say) -> None:
    """Trace the first schedules of a cell, and work out the reference outputs of all its workloads."""
    first = parse_line(str(order["line"]))
    traced, wanted = int(str(order["traced"])), int(str(order["schedules"]))
    workloads = Workloads()
    references = {}
    for number in range(wanted):
        plan = dataclasses.replace(first, schedule=number)
        references[str(workload_seed(plan))] = {str(key): [*value] for key, value in workloads.of(plan)[1].items()}
    runner = ScheduleRunner(TARGETS.load(first.target)(), workloads=Workloads(lambda plan: _tokens(references, plan)))
    trace = LineTrace(folder, CACHE)
    lines: dict[str, dict[int, int]] = {}
    costs, cpu_s = [], []
    for number in range(traced):
        plan = dataclasses.replace(first, schedule=number)
        say({"at": plan.line()})
        before = time.process_time()
        with trace.tracing() as seen:
            outcome = runner.run(plan)
        cpu_s.append(round(time.process_time() - before, 3))
        costs.append(outcome.evidence.events)
        if outcome.findings or outcome.unjudged:
            say({"clean": False, "line": plan.line(), **_told(outcome)})
            return
        for file, numbers in seen.items():
            row = lines.setdefault(file, {})
            for line in numbers:
                row[line] = row.get(line, 0) | 1 << number
    found = {"costs": costs, "cpu_s": cpu_s, "lines": {file: dict(sorted(row.items())) for file, row in lines.items()}}
    say({"cell": first.cell, "line": first.line(), **found, "references": references})


def judge(order: Mapping[str, object], say: Say) -> None:
    """Run the order's schedules until one fails or the budget is used up.

    runs: plan lines with the CPU seconds after which each counts as endless.
    """
    runs: list[tuple[str, float]] = order["runs"]  # type: ignore[assignment]
    budget, began, ran = float(str(order["cpu_s"])), time.process_time(), 0
    workloads = Workloads(lambda plan: _known(str(order["references"]), plan))
    runners: dict[str, ScheduleRunner] = {}
    cells: dict[str, int] = {}
    broken = ""

    def end(outcome: str, **values: object) -> None:
        spent = round(time.process_time() - began, 3)
        say({"outcome": outcome, "schedules": ran, "cpu_s": spent, "cells": cells, "broken": broken, **values})

    for text, most_s in runs:
        if ran and time.process_time() - began >= budget:
            break
        plan = parse_line(text)
        say({"at": text})
        if plan.target not in runners:
            runners[plan.target] = ScheduleRunner(TARGETS.load(plan.target)(), workloads=workloads)
        ran += 1
        cells[plan.cell] = cells.get(plan.cell, 0) + 1
        try:
            with cpu_limit(most_s):
                outcome = runners[plan.target].run(plan)
        except Endless:
            return end("hang", line=text, message=f"a schedule took more than {most_s:.0f} CPU seconds")
        except (KvcheckError, MemoryError) as error:
            trouble = machine_trouble(error) or f"{type(error).__name__}: {error}"
            return end("crash", line=text, message=trouble)
        if any(finding.condition is None for finding in outcome.findings):
            return end("killed", line=text, **_told(outcome))
        broken = broken or next(iter(outcome.broken_oracles), "")
    end("survived")


@contextmanager
def cpu_limit(most_s: float) -> Iterator[None]:
    """Raise Endless inside the block after so many CPU seconds of this process."""
    is_inside = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not is_inside:
            return
        if would_be_lost(frame):
            signal.setitimer(signal.ITIMER_PROF, LOOK_AGAIN_S)
            return
        raise Endless

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _told(outcome: Outcome) -> dict[str, object]:
    """What a failing schedule found: the first finding, and every pair of oracle and code."""
    found: tuple[Finding, ...] = outcome.findings
    kinds = [*dict.fromkeys((each.oracle, each.code) for each in found)]
    first = found[0] if found else None
    return {
        "oracle": first.oracle if first else "",
        "code": first.code if first else "",
        "message": first.message if first else str(outcome.unjudged),
        "kinds": [f"{oracle} {code}" for oracle, code in kinds],
    }


@cache
def _read_references(file: str) -> dict[str, dict[str, list[int]]]:
    return dict(json.loads(Path(file).read_text(encoding="utf-8"))["references"])


def _known(folder: str, plan: Plan) -> Mapping[int, tuple[int, ...]]:
    """Raises InternalError for a workload that was not surveyed: the edited code must not make its own reference."""
    outputs = _tokens(_read_references(str(Path(folder) / file_of(plan.cell))), plan)
    if outputs is None:
        raise InternalError(f"{plan.line()}: expected a workload whose outputs were kept, got another")
    return outputs


def _tokens(references: Mapping[str, Mapping[str, list[int]]], plan: Plan) -> Mapping[int, tuple[int, ...]] | None:
    outputs = references.get(str(workload_seed(plan)))
    return None if outputs is None else {int(request): tuple(tokens) for request, tokens in outputs.items()}


def file_of(cell: str) -> str:
    """The name of the file with what is known of a cell."""
    return f"{cell.replace('/', '+')}.json"
