"""Batches: the units of a run of many seeds, and their results.

A batch is one seed of one cell, or one explored workload.

Invariants:
- The line of a batch's first schedule is its name, unique in the plan.
- Two batches share no workload, so counts of distinct traces add up.
- A result follows from task and code alone, so a batch may run anywhere, and twice.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.run.outcome import TargetOf
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.runners import row_of
from kvcheck.core.run.turns import CellTask, Limit, take_turns
from kvcheck.core.run.workers import failure
from kvcheck.core.stress.plan_scenario import scenario_of

BATCHES = "batches"
"""The argument with which a worker runs batches, one a line, until its input ends."""
LEDGER = "batches.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsPlan:
    """schedules: of each cell and seed. within: explore within so many answers; `schedules` then counts workloads, and
    None takes one of each variant."""

    cells: tuple[Plan, ...]
    seeds: range
    schedules: int | None
    within: int | None = None

    def batches_of(self, cell: Plan) -> int:
        if self.within is None:
            return 1
        return self.schedules or scenario_of(cell).table.variants

    def tasks(self, done: Collection[str] = ()) -> Iterator[BatchTask]:
        """In turn over the cells: a run that is stopped early has run all cells."""
        sizes = [self.batches_of(cell) for cell in self.cells]
        schedules = (self.schedules or 1) if self.within is None else 1
        for seed in self.seeds:
            for number in range(max(sizes)):
                for cell, size in zip(self.cells, sizes, strict=True):
                    line = dataclasses.replace(cell, seed=seed, schedule=number).line()
                    if number < size and line not in done:
                        yield BatchTask(line=line, schedules=schedules, within=self.within)

    def has(self, batch: Plan) -> bool:
        cell = next((each for each in self.cells if each.cell == batch.cell), None)
        return (
            cell is not None
            and batch == dataclasses.replace(cell, seed=batch.seed, schedule=batch.schedule)
            and batch.seed in self.seeds
            and batch.schedule < self.batches_of(cell)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask:
    """line: its first schedule. within: explore its workload instead."""

    line: str
    schedules: int = 1
    within: int | None = None
    left_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """code: the digest of the kvcheck that ran it. reason: why it cannot count as a pass."""

    line: str
    code: str
    evidence: Evidence = field(default_factory=Evidence)
    findings: tuple[Finding, ...] = ()
    is_whole: bool = False
    reason: str | None = None
    note: str | None = None
    cpu_s: float = 0.0
    duration_s: float = 0.0

    @property
    def plan(self) -> Plan:
        return parse_line(self.line)


def result_from(value: object) -> BatchResult:
    result: BatchResult = value_from(BatchResult, value, "batch")
    return result


def run_batch(
    task: BatchTask, target_of: TargetOf, begins: Callable[[Plan], None] = lambda plan: None
) -> BatchResult | None:
    """Run a batch in this process; None if the time cut it."""
    plan = parse_line(task.line)
    cell = CellTask(plan=plan, schedules=task.schedules, confirms=row_of(plan).confirms, within=task.within)
    began, spent = time.monotonic(), time.process_time()
    limit = Limit(until=None if task.left_s is None else began + task.left_s)
    evidence = Evidence()
    findings: list[Finding] = []
    reason: str | None = None
    note: str | None = None
    is_whole = False
    for report in take_turns([(0, cell)], limit, target_of, begins=lambda number, plan: begins(plan)):
        note = note or report.note
        if report.evidence is not None:
            evidence = evidence.plus(report.evidence)
            findings += report.findings
            reason = reason or report.reason
            continue
        is_whole = evidence.schedules >= task.schedules if task.within is None else report.scope is not None
        if report.cut is not None and report.cut == report.reason:  # the machine ended it, not its time
            reason = reason or report.cut
    if not (is_whole or findings or reason):
        return None
    return BatchResult(
        line=task.line,
        code=code_digest(),
        evidence=evidence,
        findings=tuple(findings),
        is_whole=is_whole,
        reason=reason,
        note=note,
        cpu_s=round(time.process_time() - spent, 4),
        duration_s=round(time.monotonic() - began, 4),
    )


def answered(text: str, target_of: TargetOf, say: Callable[[str], None] = lambda line: None) -> str:
    task: BatchTask = value_from(BatchTask, json.loads(text), "task")
    result = run_batch(task, target_of, lambda plan: say(json.dumps({"told": plan.line()})))
    return json.dumps({"result": to_plain(result)})


def result_of(answer: str) -> BatchResult | None:
    """Return the result of an answer line, or None if the time cut the batch. Raises the worker's error."""
    row = json.loads(answer)
    if row.get("error") is not None:
        raise failure(row["exit_code"], row["error"])
    return None if row["result"] is None else result_from(row["result"])


def append(path: Path, found: Sequence[BatchResult]) -> None:
    text = "".join(f"{json.dumps(to_plain(each))}\n" for each in found)
    try:
        with path.open("a", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; what it holds is kept: make room, and go on with --resume"
        ) from error


def read_ledger(path: Path, plan: SeedsPlan) -> tuple[list[BatchResult], bool]:
    """Return the results of a run of this plan, and whether the last line was cut off. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {why_unread(error)}; expected the batches of a run with --seeds, beside its run.json"
        ) from error
    *lines, rest = text.split("\n")
    found: dict[str, BatchResult] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = result_from(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: expected a batch of a run with --seeds: {error}") from error
        if result.line in found or not plan.has(result.plan):
            why = "is there twice" if result.line in found else "is not of the plan of its run"
            raise UsageError(f"{path}, line {number}: {result.line} {why}; expected each batch of the plan once")
        found[result.line] = result
    return [*found.values()], bool(rest)
