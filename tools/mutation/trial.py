"""Trial: the work of a forked process: surveying a cell of the code as it is, or judging one edit.

Invariants:
- Edited code is compared with reference outputs of the code as it is, never with its own.
- A schedule runs under the plan of a default run, so a kill is a line that `kvcheck replay` takes.
- CPU seconds are counted by this process alone. They end a trial and decide no verdict, but for an endless loop.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from kvcheck.core.base.deadline import LOOK_AGAIN_S, would_be_lost
from kvcheck.core.base.errors import InternalError, KvcheckError, machine_trouble
from kvcheck.core.base.record import Evidence, to_plain, value_from
from kvcheck.core.probes.frame.lines_run import lines_of
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan, parse_line, workload_seed
from kvcheck.core.stress.runner import ScheduleRunner, Workloads
from kvcheck.core.stress.targets import TARGETS
from tools.mutation.edits import CACHE, PACKAGE

Say = Callable[[dict[str, object]], None]


class Endless(BaseException):
    """A schedule used far more CPU time than its cell needs."""


def survey(say: Say, *, line: str, traced: int, schedules: int) -> None:
    """Note the lines that the first schedules of a cell run, and make the reference outputs of all its workloads."""
    first = parse_line(line)
    workloads = Workloads()
    references = {}
    for number in range(schedules):
        plan = dataclasses.replace(first, schedule=number)
        outputs = workloads.of(plan)[1].outputs
        references[str(workload_seed(plan))] = {str(key): [*value] for key, value in outputs.items()}
    runner = ScheduleRunner(TARGETS.load(first.target)(), workloads=Workloads(lambda plan: _tokens(references, plan)))
    lines: dict[str, dict[int, int]] = {}
    costs, cpu_s, evidence = [], [], []
    for number in range(traced):
        plan = dataclasses.replace(first, schedule=number)
        say({"at": plan.line()})
        before = time.process_time()
        outcome, reached = lines_of(partial(runner.run, plan), PACKAGE, (CACHE,))
        cpu_s.append(round(time.process_time() - before, 3))
        costs.append(outcome.evidence.events)
        evidence.append(to_plain(outcome.evidence))
        if outcome.findings or outcome.unjudged:
            say({"clean": False, "line": plan.line(), **_found(outcome)})
            return
        for path, numbers in reached.items():
            row = lines.setdefault(path, {})
            for at in sorted(numbers):
                row[at] = row.get(at, 0) | 1 << number
    found = {"costs": costs, "cpu_s": cpu_s, "lines": lines, "evidence": evidence, "references": references}
    say({"cell": first.cell, "line": first.line(), **found})


def judge(say: Say, **arguments: Any) -> None:
    say(Trial(say, **arguments).result())


class Trial:
    """One edited build, while its schedules run.

    runs: plan lines, with the CPU seconds after which each counts as endless. cells: the survey of each cell.
    """

    def __init__(
        self,
        say: Say,
        *,
        runs: Sequence[tuple[str, float]],
        cells: Mapping[str, Mapping[str, Any]],
        cpu_s: float,
        stuck_cpu_s: float,
    ) -> None:
        self._say, self._runs, self._cells, self._cpu_s = say, runs, cells, cpu_s
        self._began = time.process_time()
        self._runner = ScheduleRunner(
            TARGETS.load("builtin")(), workloads=Workloads(self._known_outputs), stuck_cpu_s=stuck_cpu_s
        )
        self._evidence: dict[str, dict[int, Evidence]] = {}
        self._broken = ""

    def result(self) -> dict[str, object]:
        for text, most_s in self._runs:
            if self._evidence and time.process_time() - self._began >= self._cpu_s:
                break
            if (found := self._schedule(text, most_s)) is not None:
                return self._ended(**found)
        return self._ended(**self._unexercised())

    def _ended(self, outcome: str, **values: object) -> dict[str, object]:
        ran = {cell: len(rows) for cell, rows in self._evidence.items()}
        spent = round(time.process_time() - self._began, 3)
        head = {"outcome": outcome, "schedules": sum(ran.values()), "cpu_s": spent, "cells": ran}
        return {**head, "broken": self._broken, **values}

    def _schedule(self, text: str, most_s: float) -> dict[str, Any] | None:
        """Run one schedule. Returns what ends the trial, or None."""
        plan = parse_line(text)
        self._say({"at": text})
        rows = self._evidence.setdefault(plan.cell, {})
        rows[plan.schedule] = Evidence()
        try:
            with cpu_limit(most_s):
                outcome = self._runner.run(plan)
        except Endless:
            return {"outcome": "hang", "line": text, "message": f"a schedule took more than {most_s:.0f} CPU seconds"}
        except (KvcheckError, MemoryError) as error:
            trouble = machine_trouble(error) or f"{type(error).__name__}: {error}"
            return {"outcome": "crash", "line": text, "message": trouble}
        if any(finding.condition is None for finding in outcome.findings):
            return {"outcome": "killed", "line": text, **_found(outcome)}
        rows[plan.schedule] = outcome.evidence
        self._broken = self._broken or next(iter(outcome.broken_oracles), "")
        return None

    def _unexercised(self) -> dict[str, Any]:
        """survived; or unknown, where a cell lacks evidence that its first schedules have on the code as it is.

        One such cell is decided: the first that ran. All of its traced schedules run for it.
        """
        for cell, rows in self._evidence.items():
            known = self._known_evidence(cell)
            usual = [*known.values()][: 1 + max(rows)]
            if max(rows) >= len(known) or self._gap(cell, usual) is not None:
                continue
            if self._gap(cell, [rows.get(number, each) for number, each in [*known.items()][: 1 + max(rows)]]) is None:
                continue
            for text, most_s in self._runs:
                plan = parse_line(text)
                is_left = plan.cell == cell and plan.schedule in known and plan.schedule not in rows
                if is_left and (found := self._schedule(text, most_s)) is not None:
                    return found
            gap = self._gap(cell, [rows.get(number, each) for number, each in known.items()])
            if gap is not None:
                return {"outcome": "unknown", "line": self._line(cell), "message": f"{cell}: {gap}"}
            break
        return {"outcome": "survived"}

    def _gap(self, cell: str, rows: Sequence[Evidence]) -> str | None:
        total = Evidence(schedules=0)
        for each in rows:
            total = total.plus(each)
        return self._runner.gap(parse_line(self._line(cell)), total)

    def _line(self, cell: str) -> str:
        return next(text for text, _ in self._runs if parse_line(text).cell == cell)

    def _known_outputs(self, plan: Plan) -> Mapping[int, tuple[int, ...]]:
        """Raises InternalError for a workload that was not surveyed: edited code must not make its own reference."""
        outputs = _tokens(self._cells[plan.cell]["references"], plan)
        if outputs is None:
            raise InternalError(f"{plan.line()}: expected a workload whose outputs were kept, got another")
        return outputs

    def _known_evidence(self, cell: str) -> dict[int, Evidence]:
        rows = self._cells[cell]["evidence"]
        return {number: value_from(Evidence, row, "evidence") for number, row in enumerate(rows)}


@contextmanager
def cpu_limit(most_s: float) -> Iterator[None]:
    """Raise Endless inside the block after so many CPU seconds of this process in user code.

    The runner watches by another timer.
    """
    is_inside = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not is_inside:
            return
        if would_be_lost(frame):
            signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_AGAIN_S)
            return
        raise Endless

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, most_s)
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _found(outcome: Outcome) -> dict[str, object]:
    kinds = [*dict.fromkeys((each.oracle, each.code) for each in outcome.findings)]
    first = outcome.findings[0] if outcome.findings else None
    return {
        "oracle": first.oracle if first else "",
        "code": first.code if first else "",
        "message": first.message if first else str(outcome.unjudged),
        "kinds": [f"{oracle} {code}" for oracle, code in kinds],
    }


def _tokens(references: Mapping[str, Mapping[str, list[int]]], plan: Plan) -> Mapping[int, tuple[int, ...]] | None:
    outputs = references.get(str(workload_seed(plan)))
    return None if outputs is None else {int(request): tuple(tokens) for request, tokens in outputs.items()}
