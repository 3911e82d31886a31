"""`kvcheck replay`: run a printed schedule again, or the findings of a run.

Invariants:
- FIXED needs a judged run that followed the recorded path, if any. A line without an expected finding is CLEAN.
- A finding is printed even if something else went wrong.
- On a device, only wrong bytes under imposed delays reproduce a finding, and FIXED is never printed.
- The first requests are the line's. Later ones make the same situation in other words, since the server may have cached
  the first.
- A server is not deterministic: a line that does not fail again is UNKNOWN and never fixed.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands import server as of_server
from kvcheck.commands.held import Replayed, replay_held
from kvcheck.commands.options import DEFAULT_OUT, Format, StoredIn, check_plan, check_positive, command_line
from kvcheck.commands.own_target import WORKER
from kvcheck.commands.probes import installed_engine
from kvcheck.commands.server import Server, known_answers
from kvcheck.commands.targets import target_of
from kvcheck.commands.terminal import print_json, say, say_fitting
from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, Verdict, read_record
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.live.line import LivePlan, OwnPlan, is_live_line, is_own_line, parse_live_line, parse_own_line
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.live.runner import LiveRunner, RoundResult
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.report.story_text import has_story
from kvcheck.core.report.view import verdicts_text
from kvcheck.core.report.wording import FINDING, PROOF, SMALL, replay_line, small_line, whole_proof_line
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.store import find_run, is_stored
from kvcheck.core.run.turns import CellTask, Limit, Report

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers
    from kvcheck.core.probes.runner import ProbeRunner

NOT_DETERMINISTIC = "a server is not deterministic: only its requests are the same, not what it does when"


def replay(
    what: Annotated[
        list[str], typer.Argument(help="Schedule lines, findings as RUN#N or run.json#N, run ids or run folders.")
    ],
    times: Annotated[int, typer.Option(help="How often to run each schedule.")] = 1,
    format_name: Format = "text",
    device: Annotated[
        str | None, typer.Option(help="threads, cuda or cuda:N: delay on this device what the CPU found unordered.")
    ] = None,
    out: StoredIn = DEFAULT_OUT,
    timeout: of_server.Timeout = of_server.DEFAULT_TIMEOUT_S,
    key_env: of_server.KeyEnv = None,
    admin: of_server.Admin = False,
    allow_remote: of_server.AllowRemote = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run a target of your own in this process, for a debugger.")
    ] = False,
) -> int:
    from kvcheck.core.run.runners import row_of

    check_positive("--times", times)
    found = [line for each in what for line in lines_of(each, out)]
    sent: list[LivePlan | OwnPlan] = [parse_live_line(line) for line in found if is_live_line(line)]
    sent += [parse_own_line(line) for line in found if is_own_line(line)]
    plans = [parse_line(line) for line in found if not (is_live_line(line) or is_own_line(line))]
    server = of_server.Server(timeout_s=timeout, key_env=key_env, admin=admin, allow_remote=allow_remote)
    if sent and device is not None:
        raise UsageError(f"--device {device}: a running server has its own; leave it out")
    for plan in plans:
        row_of(plan).check_names(plan)
        for each in (plan,) if device is None else (_on_device(plan, device), plan):  # the CPU runs it first
            check_plan(each)
    verdicts: list[Verdict] = []
    follows: str | None = None
    schedules = _replayed(plans, times, device, in_process=in_process)
    for of, done in chain[tuple[Plan | RoundPlan, Replayed]](
        schedules, ((each, replay_sent(each, times, server)) for each in sent)
    ):
        if format_name == "json":
            print_json(done.plain(of, times), indent=None)
        for line in done.told if format_name == "text" else ():
            say_fitting(line)
        follows = None if any("   next " in line for line in done.told) else _next(what[0], of, done.verdict, out)
        verdicts.append(done.verdict)
    worst = Verdict.worst(verdicts)
    if format_name == "text":
        if len(verdicts) > 1:
            say(f" {worst.value.upper()}  {counted(len(verdicts), 'line')}: {verdicts_text(verdicts)}")
            if worst is Verdict.FAIL and len(what) == 1:
                say(f"   next    {_after_failure(what[0], out)}")
        elif follows is not None:
            say(f"   next    {follows}")
        say(f" exit {worst.exit_code}")
    return worst.exit_code


def _next(what: str, plan: Plan | RoundPlan, verdict: Verdict, out: Path) -> str | None:
    """Return the command after one line: the story of a failure, or its cell, since one schedule is no proof."""
    if verdict is Verdict.FAIL and not _is_line(what) and (named := FINDING.fullmatch(what)):
        if not isinstance(plan, Plan):  # a server's finding has no story
            return command_line("report", named["run"], "-o", "html=report.html", out=out)
        return _after_failure(what, out)
    if not isinstance(plan, Plan) or not plan.is_in_process or plan.on_device:
        return None
    if verdict is Verdict.FAIL:
        return f"kvcheck shrink {plan.line()}"
    if verdict is Verdict.PASS:
        target = [] if plan.own_target is None else ["--target", plan.own_target]
        return command_line("stress", plan.scenario, "--shape", plan.shape, *target)
    return None


def _after_failure(what: str, out: Path) -> str:
    """Return the command that shows the story of a finding or a run; without one, the meaning of the first code."""
    named = None if is_stored(what) else FINDING.fullmatch(what)
    record = read_record(find_run(what if named is None else named["run"], out))
    number = None if named is None else f"{record.run_id}.{int(named['number'])}"
    found = [each for each in record.findings if number in (None, each.id)]
    if any(has_story(record, each) for each in found):
        return command_line("show", what if named is None else f"{named['run']}#{named['number']}", out=out)
    return f"kvcheck explain {found[0].code}"


def _replayed(
    plans: list[Plan], times: int, device: str | None, *, in_process: bool
) -> Iterator[tuple[Plan, Replayed]]:
    for _, group in groupby(plans, key=lambda plan: (plan.target, plan.device, plan.engine_env)):
        yield from _of_one_target([*group], times, device, in_process=in_process)


def _of_one_target(
    plans: list[Plan], times: int, device: str | None, *, in_process: bool
) -> Iterator[tuple[Plan, Replayed]]:
    """Yield the results of one target's lines. An engine that does not start makes them UNKNOWN."""
    if device is not None:
        yield from zip(plans, replay_held(plans, device, times, WORKER), strict=True)
        return
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(installed_engine(plans[0]))
        except UnknownVerdict as error:
            for plan in plans:
                told = f" UNKNOWN  {plan.cell}: {error}"
                yield plan, Replayed(Verdict.UNKNOWN, times, [told])
            return
        for plan in plans:
            yield plan, _replay(plan, times, engine, in_process=in_process)


def _on_device(plan: Plan, device: str) -> Plan:
    if plan.probe is not None:
        raise UsageError(f"--device {device}: a line of {plan.target} says itself where it runs; leave --device out")
    if not plan.is_in_process or plan.on_device:
        raise UsageError(f"--device {device}: expected a line of one process on a CPU, got backend={plan.backend}")
    return dataclasses.replace(plan, backend=kind_of(device), device=device, strategy="delay", choices=None)


def _replay(plan: Plan, times: int, engine: ProbeRunner | None, *, in_process: bool) -> Replayed:
    runs = _runs(plan, times, engine, in_process=in_process)
    seen = [unconditional_first(finding for report in reports for finding in report.findings) for reports in runs]
    gave = [(findings, _why_unjudged([reports])) for findings, reports in zip(seen, runs, strict=True)]
    verdict, told = judge(plan, runs, seen)
    return Replayed(verdict, sum(each == gave[0] for each in gave), told)


def _runs(plan: Plan, times: int, engine: ProbeRunner | None, *, in_process: bool) -> list[list[Report]]:
    """Return the reports of each run. CUDA runs share a process until it loses its context. The user's own code may end
    its process, which is the failure again."""
    from kvcheck.core.run.turns import run_cell
    from kvcheck.core.run.workers import died, run_in_workers

    task = CellTask(plan=plan, schedules=1)
    if in_process or not (plan.backend == "cuda" or plan.own_target is not None) or engine is not None:
        return [list(run_cell(0, task, target_of, engine)) for _ in range(times)]
    runs: list[list[Report]] = [[] for _ in range(times)]
    for report in run_in_workers([task] * times, [range(times)], Limit(), WORKER):
        if plan.own_target is not None and report.exit_code == Verdict.FAIL.exit_code:
            report = dataclasses.replace(report, findings=(died(plan, report),))
        if not report.is_left:
            runs[report.cell].append(dataclasses.replace(report, reason=report.reason or report.error))
    return runs


def judge(plan: Plan, runs: list[list[Report]], seen: list[tuple[Finding, ...]]) -> tuple[Verdict, list[str]]:
    times = len(runs)
    head = plan.cell
    strayed = next((report.divergence for reports in runs for report in reports if report.divergence), None)
    wanted = [next((f for f in findings if plan.expect in (None, f.code)), None) for findings in seen]
    first = next((finding for finding in wanted if finding is not None), None)
    other = next((each for findings in seen for each in findings if each.condition is None), None)
    if first is not None and first.condition is not None and other is None:
        shown = sum(finding is not None for finding in wanted)
        return Verdict.PASS, [
            f" CONDITIONAL {shown}/{times}  {head}: {first.code} {first.message}",
            f"   only if {first.condition}",
        ]
    if first is not None and first.condition is None:
        failed = sum(finding is not None for finding in wanted)
        same = "identical each time" if all(each == seen[0] for each in seen) else "findings differ between runs"
        path = [f"   not on the recorded path: {strayed}"] if strayed else []
        return Verdict.FAIL, [
            f" STILL FAILS {failed}/{times}  {head}: {first.code} {first.message}",
            f"   {same}",
            *path,
        ]
    if other is not None:
        text = f" NOT REPRODUCED  {head}: expected {plan.expect}, found {other.code}: {other.message}"
        return Verdict.FAIL, [text]
    if strayed:
        again = dataclasses.replace(plan, strategy="portfolio", choices=None).line()
        return Verdict.UNKNOWN, [
            f" NOT REPRODUCED  {head}: no finding, but {strayed}",
            "   the code now asks for other choices, so this says nothing about the recorded run",
            f"   next    kvcheck replay {again}",
        ]
    unjudged = _why_unjudged(runs)
    if unjudged is not None:
        return Verdict.UNKNOWN, [f" UNKNOWN  {head}: {unjudged}"]
    word = "CLEAN" if plan.expect is None else "FIXED"
    return Verdict.PASS, [f" {word}  {head}: {times} of {counted(times, 'run')} clean"]


def _is_line(what: str) -> bool:
    return ":" in what and "=" in what


def _line_of(run: str, number: str, out: Path, *, part: str | None, is_smaller_better: bool) -> str:
    record = read_record(find_run(run, out))
    finding = next((each for each in record.findings if each.id == f"{record.run_id}.{int(number)}"), None)
    if finding is None:
        raise UsageError(f"run {record.run_id} has no finding {number}; it has {len(record.findings)}")
    part = SMALL if part is None and is_smaller_better and small_line(finding) else part
    commands = {PROOF: whole_proof_line, SMALL: small_line}
    line = finding.schedule if part is None else commands[part](finding).removeprefix("kvcheck replay ")
    if part == PROOF and not line:
        raise UsageError(f"finding {finding.id} has no proof, which a missing wait alone can have; leave {PROOF} out")
    if part == SMALL and not line:
        raise UsageError(f"no smaller schedule is stored of finding {finding.id}; look for one with kvcheck shrink")
    if not line:
        raise UsageError(f"finding {finding.id} is of no one schedule; run it again: {replay_line(record, finding)}")
    return line


def unconditional_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.condition is not None))


def _why_unjudged(runs: list[list[Report]]) -> str | None:
    return next((report.reason for reports in runs for report in reports if report.reason), None)


def lines_of(what: str, out: Path, *, is_smaller_better: bool = False) -> list[str]:
    """Return the lines of an argument: itself, a finding's, or those of a run's causes. Raises UsageError."""
    run, hash_sign, _ = what.rpartition("#")
    names_finding = hash_sign and (is_stored(run) or not _is_line(run))
    if not names_finding and _is_line(what):
        return [what]
    if not is_stored(what):
        if named := FINDING.fullmatch(what):
            run, number, part = named["run"], named["number"], named["part"]
            return [_line_of(run, number, out, part=part, is_smaller_better=is_smaller_better)]
        if names_finding:
            raise UsageError(f"{what}: expected the number of a finding behind #, such as {run}#1")
    record = read_record(find_run(what, out))
    causes = [finding for finding in record.findings if finding.cause is None]
    lines = list(dict.fromkeys(finding.schedule for finding in causes if finding.schedule))
    if not lines and record.findings:
        again = replay_line(record, causes[0])
        raise UsageError(f"run {record.run_id} has findings, but none of one schedule; run it again: {again}")
    if not lines:
        raise UsageError(f"run {record.run_id} has no findings to replay; its verdict is {record.verdict.value}")
    return lines


def replay_sent(plan: LivePlan | OwnPlan, times: int, server: Server) -> Replayed:
    """Send the requests of a line again. Raises UsageError."""
    known = None if isinstance(plan, OwnPlan) else _model(Path(plan.known_answers))
    client = dataclasses.replace(server, url=plan.target, decode=plan.decode, api=plan.engine).client(known)
    served, timeout_s = server.describe(client), server.timeout_s
    results: list[RoundResult] = []
    for attempt in range(times):
        names = plan.names if attempt == 0 else secrets.randbelow(1 << 32)
        sent = dataclasses.replace(plan, names=names, admin=int(bool(plan.admin) and server.admin))
        if isinstance(sent, OwnPlan):
            own = OwnRunner(
                client, vocabulary=sent.vocabulary, rounds=times, requests=sent.requests, timeout_s=timeout_s
            )
            own.begin(served, names=secrets.randbelow(1 << 32))
            results.append(own.run(sent))
        else:
            assert known is not None, "a line of a model whose answers are known"
            is_first, alphabet = attempt == 0, Alphabet(known.parameters)
            live = LiveRunner(
                client, alphabet, timeout_s=timeout_s, is_replay=is_first, is_balanced=bool(server.metrics)
            )
            live.begin(served, names=secrets.randbelow(1 << 32))
            results.append(live.run(sent))
        if results[-1].is_over:
            break
    return _told(plan, results, is_forced=server.admin or not plan.admin)


def _model(folder: Path) -> KnownAnswers:
    if not folder.is_absolute() and not folder.exists():
        raise UsageError(
            f"the line names the model by known-answers={folder}, and here is no such folder; replay it in the "
            "folder where the run was started, or write the whole path into the line"
        )
    return known_answers(folder)


def _told(plan: RoundPlan, results: list[RoundResult], *, is_forced: bool) -> Replayed:
    failed = [result for result in results if result.findings]
    notes = [f"   {NOT_DETERMINISTIC}"]
    if not is_forced:
        notes.append("   retractions on demand were left out: they need --admin here too")
    if failed:
        first = failed[0].findings[0]
        codes = Counter(found.code for result in failed for found in _first_of_each(result.findings))
        each_code = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        lines = [
            f" STILL FAILS {len(failed)}/{len(results)}  {plan.cell}: {first.code} {first.message}",
            f"   runs with each code: {each_code}",
            *notes,
        ]
        return Replayed(Verdict.FAIL, _agreed(results), lines)
    judged = sum(result.evidence.observed.get("token", 0) for result in results)
    reasons = list(dict.fromkeys(reason for result in results for reason in result.reasons))
    why = f"; {reasons[0]}" if reasons else ""
    lines = [
        f" NOT REPRODUCED 0/{len(results)}  {plan.cell}: {counted(judged, 'token')} judged, none wrong{why}",
        *notes,
    ]
    return Replayed(Verdict.UNKNOWN, _agreed(results), lines)


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    return list({found.code: found for found in reversed(findings)}.values())


def _agreed(results: list[RoundResult]) -> int:
    return sum(bool(result.findings) == bool(results[0].findings) for result in results)
