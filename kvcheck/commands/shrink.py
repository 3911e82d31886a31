"""`kvcheck shrink`: look for a smaller schedule that fails as a printed line does.

Invariants:
- Each smaller line is printed when found, so an interrupt loses nothing.
- The search starts from a finding's stored smaller line, if any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands import own_target
from kvcheck.commands.options import DEFAULT_OUT, Format, StoredIn, check_plan, check_positive
from kvcheck.commands.replay import lines_of
from kvcheck.commands.targets import runner_of
from kvcheck.commands.terminal import say
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Verdict
from kvcheck.core.live.line import is_live_line, is_own_line
from kvcheck.core.run.plan import ANSWERS, Plan, parse_line

if TYPE_CHECKING:
    from kvcheck.core.stress.shrinking import Shrunk
    from kvcheck.core.stress.wait_search import Waits


def shrink(
    what: Annotated[str, typer.Argument(help="A schedule line, or a finding as RUN#N or run.json#N.")],
    runs: Annotated[int, typer.Option(help="Most schedules to run.")] = 400,
    format_name: Format = "text",
    out: StoredIn = DEFAULT_OUT,
) -> int:
    check_positive("--runs", runs)
    plan = _plan(what, lines_of(what, out, is_smaller_better=True))
    from kvcheck.core.run.runners import row_of
    from kvcheck.core.stress.shrinking import check_shrinkable

    row_of(plan).check_names(plan)
    check_shrinkable(plan)
    check_plan(plan)
    is_text = format_name == "text"
    if is_text:
        say(f" from    {plan.line()}")
    if plan.own_target is None:
        verdict = search(plan, runs, say, is_text=is_text)
    else:
        verdict = _search_apart(plan, runs, is_text=is_text)
    if is_text:
        say(f" exit {verdict.exit_code}")
    return verdict.exit_code


def search(plan: Plan, runs: int, tell: Callable[[str], None], *, is_text: bool) -> Verdict:
    from kvcheck.core.stress.shrinking import shrink as smallest
    from kvcheck.core.stress.wait_search import search_waits

    def fails(smaller: Plan) -> None:
        if is_text:
            tell(f" fails   {smaller.line()}")

    runner = runner_of(plan)
    shrunk = smallest(runner, plan, runs=runs, tell=fails)
    waits = None
    if shrunk is not None and shrunk.last.plan.strategy == ANSWERS:
        waits = search_waits(runner, shrunk.last.plan, shrunk.finding)
    for line in _told(plan, shrunk, waits) if is_text else [_to_json(plan, shrunk, waits)]:
        tell(line)
    return Verdict.UNKNOWN if shrunk is None else Verdict.FAIL


def _search_apart(plan: Plan, runs: int, *, is_text: bool) -> Verdict:
    """Search in a worker. A schedule that ends it has shown a failure of the code under test."""
    from kvcheck.core.run.workers import Unanswered

    try:
        return own_target.shrink(plan, runs, say, is_text=is_text)
    except Unanswered as why:
        failed = f"this schedule or a smaller one: {why}"
        row = {"line": plan.line(), "verdict": Verdict.FAIL.value, "code": "KV902", "error": failed}
        say(f" STOPPED  {plan.cell}: KV902 {failed}" if is_text else json.dumps(row))
        return Verdict.FAIL


def _plan(what: str, lines: list[str]) -> Plan:
    if len(lines) != 1:
        raise UsageError(f"shrink {what}: expected one finding, got {len(lines)}; name one, such as {what}#1")
    if is_live_line(lines[0]) or is_own_line(lines[0]):
        raise UsageError("shrink: expected a line of one process on a CPU, got one of a running server")
    return parse_line(lines[0])


def _told(plan: Plan, shrunk: Shrunk | None, waits: Waits | None) -> list[str]:
    if shrunk is None:
        wanted = "nothing" if plan.expect is None else f"no {plan.expect}"
        return [f" UNKNOWN  {plan.cell}: {wanted} was found, so there is nothing to shrink; see kvcheck replay"]
    last, finding = shrunk.last.plan, shrunk.finding
    wait = [] if waits is None else [f"   wait    {waits.text()}"]
    if last == plan or shrunk.last is shrunk.first:
        head = f" NOT SMALLER  {last.cell}: {finding.code} {finding.message}"
        return [head, f"   none of {counted(shrunk.runs - 1, 'smaller schedule')} failed alike", *wait]
    (before, after), (held, holds) = shrunk.requests, shrunk.pages
    answers = "every answer is yes" if not shrunk.refused else f"answered with no: {', '.join(shrunk.refused)}"
    return [
        f" SHRUNK  {last.cell}: {finding.code} {finding.message}",
        f"   {counted(after, 'request')}, was {before}; at most {counted(holds, 'page')} each, was {held}; {answers}; "
        f"{counted(shrunk.runs, 'schedule')} run",
        *wait,
        f"   next    kvcheck replay {shrunk.line}",
    ]


def _to_json(plan: Plan, shrunk: Shrunk | None, waits: Waits | None) -> str:
    row: dict[str, object] = {
        "line": plan.line(),
        "verdict": (Verdict.UNKNOWN if shrunk is None else Verdict.FAIL).value,
    }
    if shrunk is not None:
        before, after = shrunk.requests
        row |= {"smallest": shrunk.line, "code": shrunk.finding.code, "runs": shrunk.runs}
        row |= {"requests_before": before, "requests": after, "refused": list(shrunk.refused)}
        row |= {"pages_before": shrunk.pages[0], "pages": shrunk.pages[1]}
        row["wait"] = None if waits is None else waits.text()
    return json.dumps(row)
