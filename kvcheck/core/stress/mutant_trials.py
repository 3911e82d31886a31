"""Trials of mutants: each is run beside the fixed build, on the CPU or under delays on a device.

Invariants:
- A mutant is judged only if the fixed build passes the same plan.
- On the CPU only the oracle and the code of its card kill a mutant. Other findings may come first: a race is seen in
  schedules in which the bytes still came in time.
- On a device only wrong bytes under delays count; a missing wait alone is not enough.
- A mutant that does not reproduce, or that loses the device, is UNKNOWN with the reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcheck.core.base.cells import number_of
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import HardwareError, UsageError
from kvcheck.core.base.record import Evidence, Finding, MutantResult, Verdict, to_plain, value_from
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import CellTask
from kvcheck.core.run.workers import AskedProcess, Unanswered

if TYPE_CHECKING:  # torch is imported when something runs
    from kvcheck.core.stress.delayed import Try
    from kvcheck.core.stress.runner import ScheduleRunner, TargetOf, Workloads
    from kvcheck.core.stress.targets.mutants.mutant import Mutant

BY_DELAYS = "delays on a device"
"""The killer on a device, in the place of the oracle on the mutant's card."""

MUTANTS = "mutants"
"""The argument with which a worker judges mutants, one a line, until its input ends."""

HELD_MOST = 6
"""So many schedules are tried with delays between two operations, before all of them are tried with wider ones."""

JUDGE = "ordering"
"""The oracle whose mutants lack one wait each, and whose findings name the two operations to delay."""


def timed_mutants(mutants: Sequence[Mutant], device: str, *, are_named: bool) -> list[Mutant]:
    """The mutants that a delay can show: those of one missing wait, without a need for "no" answers. Raises UsageError
    for others that were named."""
    timed = [each for each in mutants if each.killed_by == JUDGE and not each.within]
    others = [each.name for each in mutants if each not in timed]
    if are_named and others:
        raise UsageError(
            f"--device {device}: no delay shows {', '.join(others)}; expected mutants that {JUDGE} kills; "
            "next: leave out --device for others"
        )
    return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantTask:
    """line: the plan of the fixed build, on the CPU. until: the time.monotonic() of --max-time."""

    mutant: str = ""
    line: str = ""
    schedules: int
    device: str
    until: float | None = None
    max_time_s: float = 0.0


def judge_in_time(task: MutantTask, target_of: TargetOf, *, workloads: Workloads) -> MutantResult:
    try:
        with time_limit(task.until):
            return judge(
                parse_line(task.line),
                _named(task),
                task.schedules,
                target_of,
                device=task.device,
                workloads=workloads,
            )
    except TimeUp:
        return not_begun(task)


def not_begun(task: MutantTask) -> MutantResult:
    mutant = _named(task)
    row = _row(mutant, mutant.killed_by if task.device == "cpu" else BY_DELAYS)
    return dataclasses.replace(
        row, outcome="not-begun", message=f"--max-time {task.max_time_s:g} was over before it was judged"
    )


def lost(task: MutantTask, why: str) -> MutantResult:
    next_ = f"next: kvcheck selftest {task.mutant} --device {task.device} --seed {parse_line(task.line).seed}"
    return dataclasses.replace(_row(_named(task), BY_DELAYS), outcome="lost", message=f"{why}; {next_}")


def _named(task: MutantTask) -> Mutant:
    from kvcheck.core.stress.targets.mutants import mutant

    return mutant(task.mutant)


def judge(
    plan: Plan, mutant: Mutant, schedules: int, target_of: TargetOf, *, device: str, workloads: Workloads
) -> MutantResult:
    """Run the mutant, then the fixed build on the same schedules. plan: of the fixed build, on the CPU."""
    if device != "cpu":
        return _judge_on_device(plan, mutant, schedules, target_of, device=device)
    broken, used = dataclasses.replace(plan, mutant=mutant.name), 0
    findings: tuple[Finding, ...] = ()
    named: list[Finding] = []
    while used < schedules and not named:
        rest = dataclasses.replace(broken, schedule=broken.schedule + used)
        found, ran, _ = _run(rest, schedules - used, target_of, workloads)
        findings, used = findings or found, used + ran
        named = [finding for finding in found if finding.oracle == mutant.killed_by and finding.code == mutant.code]
        if not found:
            break
    clean, _, gap = _run(plan, used, target_of, workloads)
    row = dataclasses.replace(_row(mutant, mutant.killed_by), schedules=used)
    if clean:
        return _not_clean(row, clean[0])
    if named:
        return dataclasses.replace(
            row,
            outcome="killed",
            killed_by=f"{mutant.killed_by} {mutant.code}",
            message=named[0].message,
            replay=named[0].replay,
            verdict=Verdict.PASS,
        )
    if findings:
        other = f"{findings[0].oracle} {findings[0].code}"
        return dataclasses.replace(
            row, outcome="killed-by-other", killed_by=other, message=findings[0].message, verdict=Verdict.FAIL
        )
    if gap:
        return dataclasses.replace(row, outcome="not-exercised", message=gap)
    return dataclasses.replace(row, outcome="survived", verdict=Verdict.FAIL)


def _run(
    plan: Plan, schedules: int, target_of: TargetOf, workloads: Workloads
) -> tuple[tuple[Finding, ...], int, str | None]:
    from kvcheck.core.run.turns import run_cell
    from kvcheck.core.stress.runner import ScheduleRunner

    total = Evidence(schedules=0)
    gap = None
    runner = ScheduleRunner(target_of(plan), workloads=workloads)
    for report in run_cell(0, CellTask(plan=plan, schedules=schedules), target_of, runner):
        if report.evidence is None:
            gap = report.reason
            continue
        total = total.plus(report.evidence)
        if report.findings:
            return report.findings, total.schedules, None
    return (), total.schedules, gap


def _judge_on_device(plan: Plan, mutant: Mutant, schedules: int, target_of: TargetOf, *, device: str) -> MutantResult:
    from kvcheck.core.stress.delayed import rates_of, tries, why_not
    from kvcheck.core.stress.runner import ScheduleRunner

    broken, row = dataclasses.replace(plan, mutant=mutant.name), _row(mutant, BY_DELAYS)
    runner = ScheduleRunner(target_of(broken))
    made: list[Try] = []
    for used, plans in _likely_first(runner, broken, schedules, device):
        for each in plans:
            made += tries(runner, (each,))
            if made[-1].shown and not made[-1].rates.gap:  # wrong bytes while nothing was held are no delay's doing
                row = _with_fixed_build(dataclasses.replace(row, schedules=used), made, target_of)
                if row.verdict is not Verdict.UNKNOWN:
                    return row
            if (ended := made[-1].lost) is not None:
                replay = ended.findings[0].replay
                return dataclasses.replace(row, outcome="lost", schedules=used, message=made[-1].message, replay=replay)
    if row.outcome:  # shown, and the fixed build was not judged
        return row
    rest = f"; {rates_of(made).text()}" if made else "; next: a larger --schedules"
    return dataclasses.replace(row, outcome="not-reproduced", schedules=schedules, message=why_not(made) + rest)


def _likely_first(
    runner: ScheduleRunner, plan: Plan, schedules: int, device: str
) -> Iterator[tuple[int, tuple[Plan, ...]]]:
    """Schedules used, and the plans of the last one.

    First come delays of one operation until another, of HELD_MOST schedules that have any. Then every schedule, with
    all operations of one of these names delayed: a device may reach a situation in another schedule than the CPU.
    """
    from kvcheck.core.stress.delayed import device_plans, may_show, whole_names

    seen: list[Plan] = []
    held, others = 0, []
    for number in range(schedules):
        plans = device_plans(runner, dataclasses.replace(plan, schedule=number), device)
        seen += plans
        if plans and not may_show(plans[0]):
            others.append((number + 1, plans))
        elif plans:
            held += 1
            yield number + 1, plans
        if held == HELD_MOST:
            break
    yield from others[: HELD_MOST - held]
    for each in whole_names(seen):
        for number in range(schedules):
            yield number + 1, (dataclasses.replace(each, schedule=number),)


def _with_fixed_build(row: MutantResult, made: Sequence[Try], target_of: TargetOf) -> MutantResult:
    from kvcheck.core.stress.delayed import run_both
    from kvcheck.core.stress.runner import ScheduleRunner

    shown = made[-1]
    fixed = dataclasses.replace(shown.plan, mutant=None)
    free, held = run_both(ScheduleRunner(target_of(fixed)), fixed)
    outcome = held or free
    if found := (*free.findings, *outcome.findings):
        return _not_clean(row, found[0])
    if outcome.verdict is not Verdict.PASS:  # of the run under delays, the last of both
        gap = None if outcome.delays is None else outcome.delays.gap
        why = gap or f"an oracle broke: {', '.join(outcome.broken_oracles)}"
        return dataclasses.replace(row, outcome="clean-run-unknown", message=f"the fixed build was not judged: {why}")
    return dataclasses.replace(
        row,
        outcome="reproduced",
        killed_by=f"{shown.plan.choices}, try {len(made)}",
        message=f"{shown.rates.text()}: {shown.message}",
        replay=f"kvcheck replay {shown.plan.line()}",
        verdict=Verdict.PASS,
    )


def _not_clean(row: MutantResult, finding: Finding) -> MutantResult:
    text = f"the fixed build fails too: {finding.code} {finding.message}"
    return dataclasses.replace(row, outcome="clean-run-failed", message=text, verdict=Verdict.FAIL)


def _row(mutant: Mutant, killer: str) -> MutantResult:
    return MutantResult(
        name=mutant.name,
        bug=mutant.bug,
        killer=killer,
        outcome="",
        schedules=0,
        verdict=Verdict.UNKNOWN,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A judged mutant. goes_on: the process can judge another one."""

    result: MutantResult
    goes_on: bool = True


def judge_apart(tasks: Sequence[MutantTask], program: str) -> Iterator[MutantResult]:
    """The result of each mutant, from processes. One whose process died is UNKNOWN, and a new one judges the next."""
    with closing(AskedProcess(program, MUTANTS)) as judge:
        for task in tasks:
            try:
                answer: Judged = value_from(Judged, judge.ask(task, until=task.until), "answer")
            except Unanswered as why:
                result = not_begun(task) if why.died is None else lost(task, why.died)
                answer = Judged(result=result, goes_on=False)
            yield answer.result
            if not answer.goes_on:
                judge.close()


def answered(text: str, target_of: TargetOf) -> str:
    from kvcheck.core.cache.backend.cuda import CudaDevice
    from kvcheck.core.stress.runner import Workloads

    task: MutantTask = value_from(MutantTask, json.loads(text), "task")
    try:
        result = judge_in_time(task, target_of, workloads=Workloads())
        is_lost = CudaDevice(number_of(task.device)).is_lost()
    except HardwareError as error:
        result, is_lost = lost(task, str(error)), True
    return json.dumps(to_plain(Judged(result=result, goes_on=not is_lost)))
