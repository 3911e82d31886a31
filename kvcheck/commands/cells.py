"""Running cells: here, or in child processes that report one JSON line a schedule.

Invariants:
- Cells take turns by the number of the schedule, so that every cell has run a few before one has run many.
- A cell goes on until its floor, whatever it costs; only a limit of wall time that was asked for ends it before.
- A child that dies is a finding (KV902) of the cell it was running, not the end of the run.
- Children speak JSON lines over a pipe; nothing is unpickled.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcheck.commands.cell_runners import Runner, runner_of
from kvcheck.commands.orders import Limit, Order, Report
from kvcheck.core.base.child import Streams, start
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import InternalError, TargetError, UnknownVerdict, UsageError, machine_trouble
from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.stress.schedule import Plan, further_workloads, parse_line

if TYPE_CHECKING:
    from kvcheck.core.stress.probe_runner import EngineRunner
    from kvcheck.core.stress.ranks.runner import ProcessEngine


MORE_WORKLOADS = 6
"""One workload of retract-resume in five resumes nobody into pages that others had used (9 of 48, glm-5.1-tiny)."""
LATE_S = 2.0
"""A child keeps the limit of wall time itself; so long after it, it is ended."""
ENDING_S = 0.3
"""What a child has for taking its temporary folders away, before it is killed."""


BEGUN = '{"begun": true}'
"""What a worker says when all is loaded: from now on its death is that of what is under test."""


def run_orders(
    orders: Sequence[Order],
    jobs: int,
    limit: Limit,
    processes: ProcessEngine | None = None,
    installed: EngineRunner | None = None,
) -> Iterator[Report]:
    """Run all cells, `jobs` at a time."""
    if jobs <= 1 or len(orders) <= 1 or installed is not None:
        yield from take_turns([*enumerate(orders)], limit, processes, installed)
        return
    yield from _run_children(orders, jobs, limit)


def run_cell(
    number: int, order: Order, processes: ProcessEngine | None = None, installed: EngineRunner | None = None
) -> Iterator[Report]:
    """Run the schedules of one cell until one fails or all have run."""
    yield from take_turns([(number, order)], Limit(), processes, installed)


def take_turns(
    share: Sequence[tuple[int, Order]],
    limit: Limit,
    processes: ProcessEngine | None = None,
    installed: EngineRunner | None = None,
) -> Iterator[Report]:
    """Run cells, a schedule of each in turn, until all have ended; each ends with a report of its own.

    processes: runs ranks that are some. installed: the engine that the plans are about, where they are about one.
    """

    def spent() -> float:
        return time.process_time() + (installed.cpu_s if installed is not None else 0.0)

    budget = Budget(limit, spent)
    cells = [Turns(number, order, budget, runner_of(order, processes, installed)) for number, order in share]
    while cells:
        for cell in cells:
            yield from cell.turn()
        cells = [cell for cell in cells if cell.is_open]


class Budget:
    """What is left of a limit. spent: the CPU seconds of who runs the cells, until now."""

    def __init__(self, limit: Limit, spent: Callable[[], float]) -> None:
        self.until = limit.until
        self.spent = spent
        self._cpu_until = None if limit.cpu_s is None else spent() + limit.cpu_s

    def fits(self, *, cpu_s: float, wall_s: float) -> bool:
        """Whether half of a schedule that is expected to take so long is still inside: limits are kept on average."""
        is_in_cpu = self._cpu_until is None or self.spent() + cpu_s / 2 <= self._cpu_until
        return is_in_cpu and (self.until is None or time.monotonic() + wall_s / 2 <= self.until)

    @property
    def is_over(self) -> bool:
        """The limit of wall time has come."""
        return self.until is not None and time.monotonic() >= self.until


class Turns:
    """One cell under way.

    Its schedules run in order; when the budget ends them and there is no evidence yet, the first schedules of up to
    MORE_WORKLOADS further workloads follow: one may exercise what another does not.
    """

    def __init__(self, number: int, order: Order, budget: Budget, runner: Runner) -> None:
        self._number, self._order, self._budget, self._runner = number, order, budget, runner
        self._total, self._ran = order.before, order.before.schedules
        self._more: Iterator[Plan] | None = None
        self._cpu_s = self._wall_s = 0.0
        self._conditional: set[tuple[str, str | None, str | None]] = set()
        self.is_open = True

    def turn(self) -> Iterator[Report]:
        """The next schedule; the cell's end, where there is none or this one fails."""
        plan = self._next()
        if plan is None:
            yield self._end(self._runner.gap(self._total))
            return
        began, spent = time.monotonic(), self._budget.spent()
        try:
            with time_limit(self._budget.until):
                report = self._runner.run(plan)
        except TimeUp:
            yield self._end(self._runner.gap(self._total), _cut(plan, time.monotonic() - began))
            return
        except (UnknownVerdict, OSError, MemoryError, RuntimeError, ImportError) as error:
            why = str(error) if isinstance(error, UnknownVerdict) else machine_trouble(error)
            if why is None:
                raise
            yield self._end(why, why)
            return
        self._cpu_s, self._wall_s = self._budget.spent() - spent, time.monotonic() - began
        assert report.evidence is not None, "a schedule has evidence"
        self._total, self._ran = self._total.plus(report.evidence), self._ran + 1
        findings = self._news(self._confirmed(report.findings))
        yield replace(report, cell=self._number, schedule=plan.schedule, findings=findings, duration_s=self._wall_s)
        if any(each.condition is None or self._order.fails_on_conditional for each in findings):
            yield self._end(None)

    def _next(self) -> Plan | None:
        """The plan to run now, or None."""
        order, at = self._order, self._ran
        if self._budget.is_over or self._runner.gives_up:
            return None
        behind = replace(order.plan, schedule=order.plan.schedule + at)
        if self._more is None:
            is_due = at < order.floor or self._budget.fits(cpu_s=self._cpu_s, wall_s=self._wall_s)
            if at < order.schedules and is_due:
                return behind
            self._more = further_workloads(behind, min(MORE_WORKLOADS, max(0, order.schedules - at)))
        return None if self._runner.gap(self._total) is None else next(self._more, None)

    def _confirmed(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        if not findings:
            return ()
        try:
            with time_limit(self._budget.until):
                return self._runner.confirm(findings, lambda: not self._budget.is_over)
        except TimeUp:
            return findings

    def _news(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings without the conditional ones that an earlier schedule has given: they do not end the cell."""
        fresh = [each for each in findings if (each.code, each.buffer, each.condition) not in self._conditional]
        self._conditional |= {(each.code, each.buffer, each.condition) for each in fresh if each.condition is not None}
        return tuple(fresh)

    def _end(self, reason: str | None, cut: str | None = None) -> Report:
        self.is_open = False
        note = self._runner.closing()
        return Report(cell=self._number, reason=reason, cut=cut, note=note, is_note_told=note is not None)


def _cut(plan: Plan, after_s: float) -> str:
    from kvcheck.core.stress.cost import cost_text

    return f"--max-time cut its schedule {plan.schedule} after {after_s:.1f} s ({cost_text(plan)})"


def _run_children(orders: Sequence[Order], jobs: int, limit: Limit) -> Iterator[Report]:
    messages: queue.Queue[tuple[int, str | None]] = queue.Queue()
    shares = [list(range(start, len(orders), jobs)) for start in range(min(jobs, len(orders)))]
    children = [_start(index, [(n, orders[n]) for n in share], limit, messages) for index, share in enumerate(shares)]
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
        _end_all(children)


def _failed(report: Report, open_cells: set[int]) -> Iterator[Report]:
    """The ends of the cells that a process has left: its death, or its last line, which says why it could not go on.

    Raises what the process has raised where a run without other processes would have ended with it.
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


def _end_all(children: Sequence[subprocess.Popen[str]]) -> None:
    """End children: asked first, so that they take their temporary folders away, then killed."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    until = time.monotonic() + ENDING_S
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _start(
    index: int, share: list[tuple[int, Order]], limit: Limit, messages: queue.Queue[tuple[int, str | None]]
) -> subprocess.Popen[str]:
    streams = Streams(stdin=subprocess.PIPE)
    child = start("kvcheck.commands.worker", streams=streams, variables={"OMP_NUM_THREADS": "1"})
    if child.stdin is None or child.stdout is None:
        raise InternalError("a child process came without pipes")
    child.stdin.write(orders_text(share, limit))
    child.stdin.close()
    stdout = child.stdout

    def pump() -> None:
        with stdout:
            for line in stdout:
                messages.put((index, line))
        messages.put((index, None))

    threading.Thread(target=pump, daemon=True).start()
    return child


def orders_text(share: Sequence[tuple[int, Order]], limit: Limit) -> str:
    """Orders as JSON."""
    rows = [
        {"cell": number, "line": order.plan.line(), "order": {**_plain(order), "plan": None}} for number, order in share
    ]
    return json.dumps({"limit": to_plain(limit), "cells": rows})


def _plain(order: Order) -> dict[str, object]:
    plain = to_plain(order)
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def work(text: str) -> Iterator[str]:
    """A child's side: orders as JSON in, reports as JSON lines out."""
    asked = json.loads(text)
    limit: Limit = value_from(Limit, asked["limit"], "limit")
    share = []
    for row in asked["cells"]:
        values = {**row["order"], "plan": parse_line(row["line"])}
        values["before"] = value_from(Evidence, values["before"], "before")
        share.append((row["cell"], Order(**values)))
    for report in take_turns(share, limit):
        yield encode(report)


def encode(report: Report) -> str:
    """The report as a line."""
    return json.dumps(to_plain(report))


def _decode(line: str) -> Report:
    report: Report = value_from(Report, json.loads(line), "report")
    return report
