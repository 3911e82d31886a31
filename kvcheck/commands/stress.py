"""`kvcheck stress` and `kvcheck replay`.

Invariants:
- Everything the user named is checked before anything runs.
- The exit code is the record's: 0 pass, 1 finding, 4 not enough evidence, 130 interrupted with what was judged saved.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.cells import Order, Report, run_cell, run_orders
from kvcheck.commands.options import DEFAULT_OUT, FORMATS, check_choice, check_positive, draw_seed
from kvcheck.commands.report import report_targets, write_reports
from kvcheck.commands.session import Cell, Session
from kvcheck.commands.terminal import cell_line, closing_lines, findings_block
from kvcheck.core.errors import UsageError
from kvcheck.core.record import Evidence, Finding, RunRecord, Verdict, read_record
from kvcheck.core.report.store import find_run, make_folder
from kvcheck.core.stress.schedule import MAX_DIGITS, Plan, parse_line

DEFAULT_SCHEDULES = 24
DEFAULT_MAX_TIME_S = 60.0

Names = Annotated[list[str] | None, typer.Argument(help="Scenarios; all when none is named.")]


def stress(
    ctx: typer.Context,
    scenarios: Names = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shape preset; repeatable. Default: all tiny ones.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="simulated, eager or cuda.")] = None,
    strategy: Annotated[str, typer.Option(help="portfolio, eager, lazy or random.")] = "portfolio",
    schedules: Annotated[int | None, typer.Option(help="Schedules for each scenario and shape.")] = None,
    max_time: Annotated[float | None, typer.Option(help="Seconds for the whole run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Integer; one is drawn and printed when absent.")] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requests in Mooncake's JSONL format; sample: the packaged ones.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of a schedule, or of the trace.")] = None,
    mutant: Annotated[str | None, typer.Option(help="Put this bug back; see kvcheck list mutants.")] = None,
    transport: Annotated[str, typer.Option(help="How metadata travels.")] = "loopback",
    ranks: Annotated[str, typer.Option(help="Prefill x decode ranks; this version runs 1x1.")] = "1x1",
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: one a core, for several shapes.")] = None,
    target: Annotated[str, typer.Option(help="What is under test.")] = "builtin",
    out: Annotated[Path, typer.Option(help="Folder for runs.")] = DEFAULT_OUT,
    output: Annotated[
        list[str] | None, typer.Option("--output", "-o", metavar="FORMAT=PATH", help="html, csv or json; repeatable.")
    ] = None,
    format_name: Annotated[str, typer.Option("--format", help="text or json on stdout.")] = "text",
    resume: Annotated[bool, typer.Option(help="Go on with the newest interrupted run of the same plan.")] = False,
    reports: Annotated[bool, typer.Option(help="Write report.html and CSV beside run.json.")] = True,
) -> int:
    """Stress the KV cache and judge every word it serves."""
    check_choice("--format", format_name, FORMATS)
    for name, value in (
        ("--schedules", schedules),
        ("--max-time", max_time),
        ("--requests", requests),
        ("--jobs", jobs),
    ):
        check_positive(name, value)
    if ranks != "1x1":
        raise UsageError(f"--ranks: this version runs 1x1 only, got {ranks!r}")
    targets = report_targets(output)
    drawn = draw_seed() if seed is None else seed
    base = _base_plan(device, backend, strategy, drawn, trace, requests, mutant, transport, target)
    plans = _cells(base, scenarios or [], shape or [])
    wanted = schedules or (1 if trace is not None else DEFAULT_SCHEDULES)
    bounded = schedules is None and trace is None
    session = Session(
        argv=[*ctx.obj],
        repro=_repro([*ctx.obj], drawn, seed),
        seed=drawn,
        plan={"schedules": wanted, "max_time_s": max_time, "cells": [plan.line() for plan in plans]},
        out=out,
        quiet=format_name == "json",
    )
    for _, path in targets:
        make_folder(path.parent)
    kept = _resumed(session, out) if resume else {}
    workers = jobs or min(len(plans), session.cpus())
    limit = max_time if max_time is not None else (DEFAULT_MAX_TIME_S if bounded else None)
    share = None if limit is None else limit * workers / max(1, len(plans))
    orders = [Order(plan=plan, schedules=wanted, max_time_s=share) for plan in plans if _cell_id(plan) not in kept]
    session.say(
        f"kvcheck {session.version}  seed {drawn}  run {session.run_id}  {len(plans)} cells, {workers} processes"
    )
    session.say()
    for plan in plans:
        session.cells[_cell_id(plan)] = kept.get(_cell_id(plan)) or Cell(_cell_id(plan), plan.shape, wanted)
    interrupted = _collect(session, orders, workers, is_bounded=limit is not None)
    return _close(session, targets, reports=reports, interrupted=interrupted)


def replay(
    what: Annotated[str, typer.Argument(help="A schedule line, a finding id, a run id or a run folder.")],
    times: Annotated[int, typer.Option(help="How often to run each schedule.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = DEFAULT_OUT,
) -> int:
    """Run a printed schedule, or the findings of a run, again."""
    check_positive("--times", times)
    lines = _lines_of(what, out)
    worst = Verdict.PASS
    plans = [parse_line(line) for line in lines]
    for plan in plans:
        _check(plan)
    for plan in plans:
        verdict, text = _replay(plan, times)
        typer.echo(text)
        worst = Verdict.worst((worst, verdict))
    typer.echo(f" exit {worst.exit_code}")
    return worst.exit_code


def _replay(plan: Plan, times: int) -> tuple[Verdict, str]:
    """Run one plan several times; the verdict, and what to print."""
    failed = 0
    seen: list[tuple[Finding, ...]] = []
    for _ in range(times):
        reports = list(run_cell(0, Order(plan=plan, schedules=1)))
        findings = tuple(finding for report in reports for finding in report.findings)
        broken = next((report.reason for report in reports if report.reason and report.evidence is not None), None)
        if broken is not None:
            return Verdict.UNKNOWN, f" UNKNOWN  {plan.scenario}/{plan.shape}: {broken}"
        if plan.expect is None or any(finding.code == plan.expect for finding in findings):
            failed += bool(findings)
        seen.append(findings)
    head = f"{plan.scenario}/{plan.shape}"
    found = next((findings for findings in seen if findings), ())
    wanted = next((f for f in found if plan.expect in (None, f.code)), None)
    if wanted is None and found:
        return (
            Verdict.FAIL,
            f" NOT REPRODUCED  {head}: expected {plan.expect}, found {found[0].code}: {found[0].message}",
        )
    if wanted is None:
        return Verdict.PASS, f" FIXED  {head}: {times} of {times} runs are clean"
    same = "identical each time" if len(set(seen)) == 1 else "findings differ between runs"
    return Verdict.FAIL, f" STILL FAILS {failed}/{times}  {head}: {wanted.code} {wanted.message}\n   {same}"


def _lines_of(what: str, out: Path) -> list[str]:
    if ":" in what and "=" in what:
        return [what]
    run, dot, number = what.rpartition(".")
    if dot and number.isdigit() and not Path(what).exists():
        record = read_record(find_run(run, out))
        lines = [finding.schedule for finding in record.findings if finding.id == f"{record.run_id}.{number}"]
        if not lines:
            raise UsageError(f"run {record.run_id} has no finding {number}; it has {len(record.findings)}")
        if not lines[0]:
            raise UsageError(f"finding {what} is of no one schedule; run it again: {record.repro}")
        return lines
    record = read_record(find_run(what, out))
    lines = list(dict.fromkeys(finding.schedule for finding in record.findings if finding.schedule))
    if not lines and record.findings:
        raise UsageError(f"run {record.run_id} has findings, but none of one schedule; run it again: {record.repro}")
    if not lines:
        raise UsageError(f"run {record.run_id} has no findings to replay; its verdict is {record.verdict.value}")
    return lines


def _base_plan(
    device: str,
    backend: str | None,
    strategy: str,
    seed: int,
    trace: str | None,
    requests: int | None,
    mutant: str | None,
    transport: str,
    target: str,
) -> Plan:
    chosen = backend or ("cuda" if device.partition(":")[0] == "cuda" else "simulated")
    if strategy == "replay":
        raise UsageError("--strategy replay: use kvcheck replay with the line that a failure printed")
    plan = Plan(
        scenario="",
        shape="",
        target=target,
        mutant=mutant,
        backend=chosen,
        device=device,
        transport=transport,
        strategy="random" if trace is not None and strategy == "portfolio" else strategy,
        seed=seed,
        requests=requests,
        trace=trace,
    )
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    """Raise UsageError or UnknownVerdict for what a plan names and this machine or version lacks."""
    from kvcheck.core.backend import BACKENDS
    from kvcheck.core.stress.strategies import STRATEGIES
    from kvcheck.core.targets import TARGETS
    from kvcheck.core.targets.mutants import mutant
    from kvcheck.core.transfer import TRANSPORTS
    from kvcheck.core.workload.synthetic import trace_file
    from kvcheck.core.workload.traces import read_trace

    kind, colon, number = plan.device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and number.isascii() and number.isdigit())):
        raise UsageError(f"--device: expected cpu, cuda or cuda:N, got {plan.device!r}")
    BACKENDS.require(plan.backend)
    if (plan.backend == "cuda") != (kind == "cuda"):
        raise UsageError(f"--backend {plan.backend} does not run on --device {plan.device}")
    STRATEGIES.require(plan.strategy)
    TRANSPORTS.require(plan.transport)
    TARGETS.require(plan.target)
    if plan.mutant is not None:
        mutant(plan.mutant)
    check_positive("requests", plan.requests)
    if len(str(abs(plan.seed))) > MAX_DIGITS:
        raise UsageError(f"--seed: expected an integer of at most {MAX_DIGITS} digits, got {plan.seed}")
    if plan.trace is not None:
        read_trace(trace_file(plan.trace), plan.requests)
    if kind == "cuda":
        from kvcheck.core.backend.cuda import CudaBackend

        CudaBackend(int(number or 0))


def _cells(base: Plan, scenarios: list[str], shapes: list[str]) -> list[Plan]:
    from kvcheck.core.stress.scenarios import SCENARIOS
    from kvcheck.core.targets.mutants import mutant
    from kvcheck.core.workload.shapes import TINY_SHAPES
    from kvcheck.core.workload.shapes import shape as shape_named

    for name in scenarios:
        SCENARIOS.require(name)
    for name in shapes:
        shape_named(name)
    if base.mutant is not None:
        shapes = shapes or [mutant(base.mutant).shape]
        scenarios = scenarios or [mutant(base.mutant).scenario]
    cells = [
        dataclasses.replace(base, scenario=scenario, shape=name)
        for scenario in dict.fromkeys(scenarios or SCENARIOS.names())
        for name in dict.fromkeys(shapes or TINY_SHAPES)
        if shape_named(name).family in SCENARIOS.load(scenario).families
    ]
    if not cells:
        raise UsageError(
            f"{', '.join(scenarios)} does not apply to {', '.join(shapes)}; kvcheck list scenarios says what each needs"
        )
    return cells


def _collect(session: Session, orders: list[Order], workers: int, *, is_bounded: bool) -> bool:
    """Take reports until all cells are done; True when interrupted."""
    ids = [_cell_id(order.plan) for order in orders]
    try:
        for report in run_orders(orders, workers):
            _take(session, session.cells[ids[report.cell]], report, is_bounded=is_bounded)
    except KeyboardInterrupt:
        return True
    return False


def _take(session: Session, cell: Cell, report: Report, *, is_bounded: bool) -> None:
    if report.note and report.note not in session.warnings:
        session.warnings.append(report.note)
    if report.error is not None:
        _child_died(session, cell, report)
        return
    if report.evidence is not None:
        cell.reason = cell.reason or report.reason
        session.add(cell, report.findings, report.evidence, report.duration_s)
        return
    cell.is_done = True
    if not cell.findings and not cell.evidence.schedules:
        cell.reason = "its time was up before the first schedule; use a larger --max-time"
    elif cell.evidence.schedules < cell.wanted and not cell.findings and is_bounded:
        cell.wanted = cell.evidence.schedules
    cell.reason = cell.reason or report.reason
    session.save(complete=False)
    session.say(cell_line(cell.result()))


def _child_died(session: Session, cell: Cell, report: Report) -> None:
    cell.is_done = True
    if report.exit_code in (2, 4, 70):
        cell.reason = f"{report.error}; see the message above"
    else:
        message = f"{cell.id}: {report.error}"
        finding = Finding(
            code="KV902", oracle="liveness", scenario=cell.id.split("/")[0], shape=cell.shape, message=message
        )
        session.add(cell, (finding,), Evidence(schedules=1), 0.0)
    session.say(cell_line(cell.result()))


def _close(session: Session, targets: list[tuple[str, Path]], *, reports: bool, interrupted: bool) -> int:
    session.clear_progress()
    record = session.save(complete=not interrupted, exit_code=130 if interrupted else None)
    session.say()
    for line in findings_block(record.findings):
        session.say(line)
    where = str(session.folder / "run.json")
    if not interrupted:
        where = write_reports(record, session.folder, targets, beside=reports) or where
    _last_words(session, record, where)
    return record.exit_code


def _last_words(session: Session, record: RunRecord, where: str) -> None:
    for line in closing_lines(record, where):
        session.say(line)
    session.print_json(record)


def _resumed(session: Session, out: Path) -> dict[str, Cell]:
    """Finished cells of the newest interrupted run with the same plan."""
    for folder in sorted((p for p in out.iterdir() if p.name != session.run_id), reverse=True):
        if not (folder / "run.json").is_file():
            continue
        record = read_record(folder)
        if record.complete or record.plan != session.plan:
            continue
        session.keep(record.findings)
        cells = {}
        for row in record.scenarios:
            if row.verdict is not Verdict.UNKNOWN:
                cells[row.id] = Cell(
                    row.id,
                    row.shape,
                    row.schedules,
                    row.evidence,
                    int(row.verdict is Verdict.FAIL),
                    row.duration_s,
                    None,
                    True,
                )
        session.say(f"resuming {record.run_id}: {len(cells)} of {len(record.scenarios)} cells are done")
        return cells
    raise UsageError(f"--resume: no interrupted run with this plan and seed under {out}; name the seed with --seed")


def _cell_id(plan: Plan) -> str:
    return f"{plan.scenario}/{plan.shape}"


def _repro(argv: list[str], drawn: int, seed: int | None) -> str:
    extra = [] if seed is not None else ["--seed", str(drawn)]
    return shlex.join(["kvcheck", *argv, *extra])
