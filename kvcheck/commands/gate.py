"""`kvcheck gate`: integrity, evidence and overhead of stored runs, as one exit code.

Invariants:
- Exit 0 pass, 1 integrity, 2 usage, 3 slower and confirmed, 4 no evidence or inconclusive, 130 interrupted.
- Runs, budgets and report paths are checked before anything is measured.
- Rows are measured again only with the kvcheck, libraries and machine of their record.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvcheck.commands.options import (
    DEFAULT_OUT,
    ConditionalFails,
    Format,
    MinSchedules,
    StoredIn,
    check_choice,
    check_positive,
    draw_seed,
)
from kvcheck.commands.report import loaded, parse_outputs, report_problem
from kvcheck.commands.terminal import columns, print_json, say, warn
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.bench.fresh_rounds import FreshRounds
from kvcheck.core.report import GATE_WRITERS, STDOUT
from kvcheck.core.report.gate.baseline import (
    NOTHING,
    BaselineEntry,
    BaselineResult,
    JudgedEntry,
    KnownPlaces,
    judge_rows,
    known_by,
)
from kvcheck.core.report.gate.baseline_file import read_baseline
from kvcheck.core.report.gate.budgets import read_budgets
from kvcheck.core.report.gate.judge import Rules, decide
from kvcheck.core.report.gate.result import (
    ON_INCONCLUSIVE,
    GateResult,
    Problem,
    conditional_findings,
    evidence_problems,
    gated_rows,
    has_enough,
    integrity_problems,
    summaries,
    tally,
)
from kvcheck.core.report.gate.text import HEADINGS, NARROWEST, cells, decision_text, sections
from kvcheck.core.report.wording import LABEL, fitted, folded, labelled, wrapped
from kvcheck.core.run.session import environment, tool
from kvcheck.core.run.store import check_writable, find_run

DEFAULT_MAX_TIME_S = 60.0
Reported = Annotated[
    list[str] | None,
    typer.Option("--output", "-o", metavar="FORMAT=PATH", help="A report: json, md, html or a CI format; repeatable."),
]
FailOver = Annotated[float, typer.Option(help="Share above a budget from which a row is SLOWER, once confirmed.")]
OnInconclusive = Annotated[str, typer.Option(help="Where noise hides the answer: pass, warn or fail (exit 4).")]
MaxTime = Annotated[float, typer.Option(help="Seconds for the rounds that the gate measures itself.")]
BaselineFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file of known findings and expected UNKNOWNs (kvcheck baseline); engines: the one that comes "
        "with kvcheck, of the newest engines.",
    ),
]
StrictBaseline = Annotated[
    bool, typer.Option("--strict-baseline", help="Rows of the baseline that are gone fail as well.")
]
MOST_DETAILS = 10


def gate(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help="Run id or its unique start, folder, or run.json; repeatable.")],
    budget: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file of [[budget]] tables. Default: overhead is not judged."),
    ] = None,
    baseline: BaselineFile = None,
    strict_baseline: StrictBaseline = False,
    tol: Annotated[float, typer.Option(help="Share above a budget that is never called SLOWER.")] = 0.03,
    fail_over: FailOver = 0.10,
    on_inconclusive: OnInconclusive = "fail",
    max_time: MaxTime = DEFAULT_MAX_TIME_S,
    min_schedules: MinSchedules = None,
    fail_on_conditional: ConditionalFails = False,
    seed: Annotated[
        int | None, typer.Option(help="Integer seed of the gate's own rounds. Default: one is drawn.")
    ] = None,
    out: StoredIn = DEFAULT_OUT,
    output: Reported = None,
    format_name: Format = "text",
) -> int:
    started = time.monotonic()
    check_choice("--on-inconclusive", on_inconclusive, ON_INCONCLUSIVE)
    check_positive("--max-time", max_time)
    check_positive("--min-schedules", min_schedules)
    if seed is not None and seed < 0:
        raise UsageError(f"--seed: expected an integer of at least 0, got {seed}")
    rules = Rules(tol=tol, fail_over=fail_over)
    outputs = _outputs(output, format_name)
    budgets = () if budget is None else read_budgets(budget)
    entries = _entries(baseline, is_strict=strict_baseline)
    records = [read_record(path) for path in dict.fromkeys(find_run(name, out) for name in runs)]
    gated, missing, warnings = gated_rows(records, budgets)
    is_quiet = format_name == "json"
    fresh = _fresh_rounds(records, draw_seed() if seed is None else seed, max_time, is_quiet=is_quiet)
    rows, is_complete = decide(gated, rules, fresh)
    known, judged = _known(entries, records, min_schedules)
    failures = integrity_problems(records, fail_on_conditional=fail_on_conditional, known=known)
    gaps = evidence_problems(records, code=code_digest(), min_schedules=min_schedules, known=known)
    result = GateResult(
        tool=tool(),
        code=code_digest(),
        argv=tuple(ctx.obj),
        runs=summaries(records),
        min_schedules=min_schedules,
        fail_on_conditional=fail_on_conditional,
        budget_file=None if budget is None else str(budget),
        tol=tol,
        fail_over=fail_over,
        on_inconclusive=on_inconclusive,
        tally=tally(records),
        integrity=(*failures, *(Problem(None, text) for text in fresh.wrong_outputs)),
        conditional=conditional_findings(records, known),
        evidence=(*gaps, *missing),
        baseline=None if baseline is None else BaselineResult(file=str(baseline), strict=strict_baseline, rows=judged),
        rows=rows,
        warnings=warnings,
        complete=is_complete,
        duration_s=round(time.monotonic() - started, 3),
    )
    _tell(result, outputs, is_quiet=is_quiet)
    return result.exit_code


def _entries(baseline: Path | None, *, is_strict: bool) -> tuple[BaselineEntry, ...] | None:
    if baseline is None and is_strict:
        raise UsageError("--strict-baseline: expected --baseline FILE with it, got none")
    return None if baseline is None else read_baseline(baseline)


def _known(
    entries: tuple[BaselineEntry, ...] | None, records: list[RunRecord], min_schedules: int | None
) -> tuple[KnownPlaces, tuple[JudgedEntry, ...]]:
    if entries is None:
        return NOTHING, ()
    today = datetime.now(UTC).date()
    is_enough = partial(has_enough, min_schedules=min_schedules)
    return known_by(entries, records, today), judge_rows(entries, records, today, is_enough)


def _fresh_rounds(records: list[RunRecord], seed: int, max_time_s: float, *, is_quiet: bool) -> FreshRounds:
    return FreshRounds(
        records,
        seed=seed,
        max_time_s=max_time_s,
        build={**environment(), **tool()},
        say=None if is_quiet else lambda text: typer.echo(f" {text}", err=True),
        progress=_show_progress if sys.stderr.isatty() and not is_quiet else None,
    )


def _show_progress(text: str) -> None:
    typer.echo(f"\r\x1b[K {text[:100]}\r", err=True, nl=False)


def _outputs(output: list[str] | None, prints: str) -> list[tuple[str, Path]]:
    outputs = parse_outputs(output, prints, known=(GATE_WRITERS,))
    for at, (format_name, path) in enumerate(outputs):
        loaded(GATE_WRITERS, format_name)
        if path.resolve() in (other.resolve() for _, other in outputs[:at]):
            raise UsageError(f"two reports would be written to {path}; expected a path for each")
        if path != STDOUT:
            check_writable(path)
    return outputs


def _tell(result: GateResult, outputs: list[tuple[str, Path]], *, is_quiet: bool) -> None:
    lines = result_lines(result)
    for format_name, path in outputs:
        problem = report_problem(GATE_WRITERS, format_name, result, path)
        if problem is not None:
            warn(problem)
        elif path != STDOUT:
            lines.append(f" report {path}")
    for row in result.rows:
        if row.verdict.name == "INCONCLUSIVE" and result.on_inconclusive == "warn":
            warn(f"{row.id} is INCONCLUSIVE and passes by --on-inconclusive warn")
    if is_quiet:
        print_json(result.plain())
        return
    for line in [*lines, f" exit {result.exit_code}"]:
        say(line)


def result_lines(result: GateResult) -> list[str]:
    width = columns()
    only = f"{result.runs[0].run_id}: " if len(result.runs) == 1 else ""
    lines: list[str] = []
    for name, text, details in sections(result):
        lines += labelled(name, text, width)
        for detail in details[:MOST_DETAILS]:
            told, _, command = detail.removeprefix(only).partition("; next: kvcheck ")
            lines += labelled("", told, width)
            lines += [f"{'':{LABEL + 1}}next: kvcheck {command}"] if command else []
        if len(details) > MOST_DETAILS:
            lines += labelled("", f"and {len(details) - MOST_DETAILS} more; -o json=FILE has them all", width)
    if result.rows:
        rows = [HEADINGS, *(cells(row) for row in result.rows)]
        natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths = fitted(natural, NARROWEST, width - 1, 1)
        lines += ["", *(line for row in rows for line in folded(row, widths, margin=1, gap=1))]
    return [*lines, "", *wrapped(f" {result.verdict}  {decision_text(result)}   {result.duration_s:.1f} s", width)]
