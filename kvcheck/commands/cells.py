"""Running cells: here, or in child processes that report one JSON line a schedule.

Invariants:
- A child that dies is a finding (KV902) of the cell it was running, not the end of the run.
- Children speak JSON lines over a pipe; nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcheck.core.errors import InternalError
from kvcheck.core.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.stress.schedule import Plan, further_workloads, parse_line

if TYPE_CHECKING:
    from kvcheck.core.stress.engine import StressEngine
    from kvcheck.core.stress.engines import EngineRunner
    from kvcheck.core.stress.processes.engine import ProcessEngine


MORE_WORKLOADS = 6
"""One workload of retract-resume in five resumes nobody into pages that others had used (9 of 48, glm-5.1-tiny)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A cell to run: its first plan, how many schedules, and the seconds it may take (None: no limit).

    confirms: run what the first failing schedule left unordered in the other order too, while there is time.
    """

    plan: Plan
    schedules: int
    max_time_s: float | None = None
    confirms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One schedule's outcome, or the end of a cell (`evidence` None). reason: why it cannot count as a pass.

    divergence: how a replay left its recorded choices. note: for the record; is_note_told: for the terminal too.
    """

    cell: int
    findings: tuple[Finding, ...] = ()
    evidence: Evidence | None = None
    duration_s: float = 0.0
    reason: str | None = None
    divergence: str | None = None
    note: str | None = None
    is_note_told: bool = False
    error: str | None = None
    exit_code: int | None = None


def run_cell(
    number: int, order: Order, processes: ProcessEngine | None = None, installed: EngineRunner | None = None
) -> Iterator[Report]:
    """Run a cell's schedules until one fails, all have run, or its time is up.

    processes: runs ranks that are some. installed: the engine that the plan is about, where it is one.
    """
    from kvcheck.core.stress.confirm import confirmed
    from kvcheck.core.stress.engine import evidence_gap

    if order.plan.is_in_processes:
        yield from _run_processes(number, order, processes)
        return
    if installed is not None:
        yield from _run_probe(number, order, installed)
        return
    if order.plan.is_delayed:
        yield from _run_delayed(number, order)
        return
    plan = order.plan
    engine = engine_of(plan)
    started = time.monotonic()
    total = Evidence(schedules=0)
    failed = False

    def has_time() -> bool:
        return order.max_time_s is None or time.monotonic() - started <= order.max_time_s

    def lacks() -> bool:
        return evidence_gap(plan, total) is not None

    for each, began in _in_time(order, lacks):
        outcome = engine.run(each)
        total = total.plus(outcome.evidence)
        reason = f"an oracle broke: {outcome.broken_oracles[0]}" if outcome.broken_oracles else None
        yield Report(
            cell=number,
            findings=confirmed(engine, outcome, has_time) if order.confirms else outcome.findings,
            evidence=outcome.evidence,
            duration_s=time.monotonic() - began,
            reason=reason,
            divergence=outcome.divergence,
            note=engine.note(each) if each.trace is not None else None,
        )
        if outcome.findings:
            failed = True
            break
    gap = None if failed else evidence_gap(plan, total)
    yield Report(cell=number, reason=gap)


def _in_time(order: Order, lacks: Callable[[], bool] = lambda: False) -> Iterator[tuple[Plan, float]]:
    """The schedules of a cell and when each begins, until its time is up.

    One begins where half of it, as the last one went, is still within the time: cells keep their shares on average.
    The first one warms up, and says nothing of the second. lacks: whether there is no evidence yet; then the first
    schedules of up to MORE_WORKLOADS further workloads are run besides, as one may exercise what another does not.
    """
    from kvcheck.core.stress.engine import schedules

    began = last = time.monotonic()
    for number, each in enumerate(schedules(order.plan, order.schedules)):
        started = time.monotonic()
        expected = started - last if number > 1 else 0.0
        if order.max_time_s is not None and started - began + expected / 2 > order.max_time_s:
            for more in further_workloads(each, min(MORE_WORKLOADS, order.schedules - number)):
                if not lacks():
                    return
                yield more, time.monotonic()
            return
        yield each, started
        last = started


def engine_of(plan: Plan) -> StressEngine:
    """An engine with what the plan has under test."""
    from kvcheck.core.stress.engine import StressEngine
    from kvcheck.core.targets import TARGETS
    from kvcheck.core.targets.mutants import mutant_target
    from kvcheck.core.targets.target import Target

    target: Target = TARGETS.load(plan.target)() if plan.mutant is None else mutant_target(plan.mutant)
    return StressEngine(target)


def _run_delayed(number: int, order: Order) -> Iterator[Report]:
    """A cell of a device under delays: each schedule runs without them and with them, and both are judged."""
    from kvcheck.core.stress.delayed import Rates, check_operations, run_both
    from kvcheck.core.stress.engine import evidence_gap

    engine = engine_of(order.plan)
    check_operations(engine, order.plan)
    rates, total, failed = Rates(), Evidence(schedules=0), False
    for each, started in _in_time(order):
        free, held = run_both(engine, each)
        rates, total = rates.plus(free, held), total.plus(held.evidence)
        broken = next(iter((*free.broken_oracles, *held.broken_oracles)), None)
        findings = held.findings or free.findings
        yield Report(
            cell=number,
            findings=findings,
            evidence=held.evidence,
            duration_s=time.monotonic() - started,
            reason=None if broken is None else f"an oracle broke: {broken}",
        )
        if findings:
            failed = True
            break
    gap = None if failed or not total.schedules else rates.gap or evidence_gap(order.plan, total)
    note = f"{order.plan.cell}: {rates.text()}"
    yield Report(cell=number, reason=gap, note=note, is_note_told=True)


def _run_processes(number: int, order: Order, processes: ProcessEngine | None) -> Iterator[Report]:
    """A cell whose ranks are processes: each schedule runs all of them once."""
    from kvcheck.core.stress.engine import evidence_gap
    from kvcheck.core.stress.processes.engine import ProcessEngine

    engine = processes or ProcessEngine()
    total = Evidence(schedules=0)
    for each, started in _in_time(order):
        outcome = engine.run(each)
        total = total.plus(outcome.evidence)
        yield Report(
            cell=number,
            findings=outcome.findings,
            evidence=outcome.evidence,
            duration_s=time.monotonic() - started,
            note=engine.note,
            is_note_told=True,
        )
        if outcome.findings:
            yield Report(cell=number)
            return
    yield Report(cell=number, reason=evidence_gap(order.plan, total))


def _run_probe(number: int, order: Order, installed: EngineRunner) -> Iterator[Report]:
    """A cell of an installed engine: each schedule is asked of its child."""
    for each, started in _in_time(order):
        reply = installed.run(each)
        yield Report(
            cell=number,
            findings=reply.findings,
            evidence=reply.evidence,
            duration_s=time.monotonic() - started,
            reason=reply.unknown,
            note="; ".join(f"{each.cell}: {note}" for note in reply.notes) or None,
        )
        if reply.findings or reply.unknown is not None:
            break
    yield Report(cell=number)


def run_orders(
    orders: Sequence[Order], jobs: int, processes: ProcessEngine | None = None, installed: EngineRunner | None = None
) -> Iterator[Report]:
    """Run all cells, `jobs` at a time."""
    if jobs <= 1 or len(orders) <= 1 or installed is not None:
        for number, order in enumerate(orders):
            yield from run_cell(number, order, processes, installed)
        return
    yield from _run_children(orders, jobs)


def _run_children(orders: Sequence[Order], jobs: int) -> Iterator[Report]:
    messages: queue.Queue[tuple[int, str | None]] = queue.Queue()
    shares = [list(range(start, len(orders), jobs)) for start in range(min(jobs, len(orders)))]
    children = [_start(index, [(n, orders[n]) for n in share], messages) for index, share in enumerate(shares)]
    open_cells = [set(share) for share in shares]
    running = len(children)
    try:
        while running:
            index, line = messages.get()
            if line is not None:
                report = _decode(line)
                if report.evidence is None and report.error is None:
                    open_cells[index].discard(report.cell)
                yield report
                continue
            running -= 1
            code = children[index].wait()
            for cell in sorted(open_cells[index]):
                yield Report(cell=cell, error=f"the process that ran it ended with status {code}", exit_code=code)
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait()


def _start(
    index: int, share: list[tuple[int, Order]], messages: queue.Queue[tuple[int, str | None]]
) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvcheck.commands.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if child.stdin is None or child.stdout is None:
        raise InternalError("a child process came without pipes")
    rows = [
        {
            "cell": n,
            "line": order.plan.line(),
            "schedules": order.schedules,
            "max_time_s": order.max_time_s,
            "confirms": order.confirms,
        }
        for n, order in share
    ]
    child.stdin.write(json.dumps(rows))
    child.stdin.close()
    stdout = child.stdout

    def pump() -> None:
        with stdout:
            for line in stdout:
                messages.put((index, line))
        messages.put((index, None))

    threading.Thread(target=pump, daemon=True).start()
    return child


def work(text: str) -> Iterator[str]:
    """A child's side: orders as JSON in, reports as JSON lines out."""
    for row in json.loads(text):
        order = Order(
            plan=parse_line(row["line"]),
            schedules=row["schedules"],
            max_time_s=row["max_time_s"],
            confirms=row["confirms"],
        )
        for report in run_cell(row["cell"], order):
            yield json.dumps(to_plain(dataclasses.replace(report)))


def _decode(line: str) -> Report:
    report: Report = value_from(Report, json.loads(line), "report")
    return report
