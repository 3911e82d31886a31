"""`kvcheck selftest`: the table of mutants and oracles, clean run first.

Invariants:
- The fixed build must pass the very plan a mutant is judged by, or the mutant is not judged.
- A mutant is killed only by the oracle and with the code its card names; any other end is not a pass.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.closing import close
from kvcheck.commands.device_trials import judge_on_device, not_begun, timed_mutants
from kvcheck.commands.gate_trials import try_gate
from kvcheck.commands.options import (
    DEFAULT_OUT,
    FORMATS,
    Format,
    Out,
    Outputs,
    Reports,
    Seed,
    check_choice,
    check_positive,
    draw_seed,
)
from kvcheck.commands.report import check_targets, report_targets
from kvcheck.commands.session import Session
from kvcheck.commands.targets import target_of
from kvcheck.core.base.deadline import TimeUp, time_limit
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, MutantResult, Verdict
from kvcheck.core.stress.cell_task import CellTask
from kvcheck.core.stress.schedule import Plan

if TYPE_CHECKING:
    from kvcheck.core.targets.mutants.mutant import Mutant


def selftest(
    ctx: typer.Context,
    mutants: Annotated[list[str] | None, typer.Argument(help="Mutants; all when none is named.")] = None,
    aa: Annotated[
        int | None,
        typer.Option(metavar="N", help="Instead: gate N runs of an arm beside itself; count what it says."),
    ] = None,
    planted: Annotated[
        float, typer.Option(metavar="PERCENT", help="With --aa: slow the arm down by this much, to be caught.")
    ] = 0.0,
    device: Annotated[
        str, typer.Option(help="cuda or cuda:N: show there what the CPU finds unordered, by delaying lanes.")
    ] = "cpu",
    max_time: Annotated[float | None, typer.Option(help="Seconds for the whole run, whatever is under way.")] = None,
    schedules: Annotated[int, typer.Option(help="Schedules before a mutant counts as survived.")] = 32,
    seed: Seed = None,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
) -> int:
    """Check that every mutant is killed, the fixed build first."""
    check_choice("--format", format_name, FORMATS)
    if aa is not None or planted:
        if mutants:
            raise UsageError(f"--aa tries the gate and no mutants; expected no {mutants[0]!r} beside it")
        for name, is_given in (("--device", device != "cpu"), ("--max-time", max_time is not None), ("-o", output)):
            if is_given:
                raise UsageError(f"{name}: --aa tries the gate on the CPU, N times, and writes no run; leave it out")
        return try_gate(aa, planted, seed=seed, is_quiet=format_name == "json")
    from kvcheck.core.targets.mutants import MUTANTS, mutant

    check_positive("--schedules", schedules)
    check_positive("--max-time", max_time)
    targets = report_targets(output)
    chosen = [mutant(name) for name in mutants or MUTANTS]
    if device != "cpu":
        chosen = timed_mutants(chosen, device)
    check_targets(targets)
    drawn = draw_seed() if seed is None else seed
    session = Session(
        argv=[*ctx.obj],
        repro=shlex.join(["kvcheck", *ctx.obj, *([] if seed is not None else ["--seed", str(drawn)])]),
        seed=drawn,
        plan={"schedules": schedules, "mutants": [each.name for each in chosen], "device": device},
        out=out,
        quiet=format_name == "json",
    )
    session.say(f"kvcheck {session.version}  selftest  seed {drawn}  run {session.run_id}")
    session.say()
    interrupted = False
    until = None if max_time is None else time.monotonic() - session.elapsed_s + max_time
    try:
        for each in chosen:
            plan = Plan(scenario=each.scenario, shape=each.shape, seed=drawn)
            session.progress(f"{each.name}: fixed build first")
            try:
                with time_limit(until):
                    result = _result(plan, each, device, schedules)
            except TimeUp:
                result = not_begun(each, device, max_time or 0.0)
            session.mutants.append(result)
            session.save(complete=False)
            for line in _row(result):
                session.say(line)
    except KeyboardInterrupt:
        interrupted = True
    return close(session, targets, reports=reports, interrupted=interrupted)


def _result(plan: Plan, mutant: Mutant, device: str, schedules: int) -> MutantResult:
    if device != "cpu":
        return judge_on_device(plan, mutant, device, schedules)
    return _judge(plan, mutant.name, mutant.bug, mutant.killed_by, mutant.code, schedules)


def _judge(plan: Plan, name: str, bug: str, killer: str, code: str, schedules: int) -> MutantResult:
    """Run mutant and fixed build on the same schedules until one of them fails."""
    broken = dataclasses.replace(plan, mutant=name)
    findings, used, _ = _run(broken, schedules)
    clean, _, gap = _run(plan, used)
    row = MutantResult(name=name, bug=bug, killer=killer, outcome="", schedules=used, verdict=Verdict.UNKNOWN)
    if clean:
        text = f"the fixed build fails too: {clean[0].code} {clean[0].message}"
        return dataclasses.replace(row, outcome="clean-run-failed", message=text, verdict=Verdict.FAIL)
    named = [finding for finding in findings if finding.oracle == killer and finding.code == code]
    if named:
        return dataclasses.replace(
            row,
            outcome="killed",
            killed_by=f"{killer} {code}",
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


def _run(plan: Plan, schedules: int) -> tuple[tuple[Finding, ...], int, str | None]:
    """Findings of the first failing schedule, schedules used, and what was not exercised."""
    from kvcheck.core.stress.turns import run_cell

    total = Evidence(schedules=0)
    gap = None
    for report in run_cell(0, CellTask(plan=plan, schedules=schedules), target_of):
        if report.evidence is None:
            gap = report.reason
            continue
        total = total.plus(report.evidence)
        if report.findings:
            return report.findings, total.schedules, None
    return (), total.schedules, gap


def _row(result: MutantResult) -> list[str]:
    word = {Verdict.PASS: "PASS", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "????"}[result.verdict]
    text = f" {word}  {result.name:<30} bug {result.bug}  {result.outcome:<16} by {result.killed_by or '-':<18}"
    text += f" schedule {result.schedules}"
    return [text, f"       {result.message}"] if result.message else [text]
