"""`kvcheck shrink`: look for a smaller schedule that fails as a printed line does.

Invariants:
- Each smaller line is printed as it is found, so an interrupted search has lost nothing.
- A line that does not fail any more is UNKNOWN, exit 4: there is nothing to make smaller.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.options import DEFAULT_OUT, FORMATS, Format, StoredIn, check_choice, check_plan, check_positive
from kvcheck.commands.replay import lines_of
from kvcheck.commands.targets import runner_of
from kvcheck.commands.terminal import say
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Verdict
from kvcheck.core.live.line import is_live_line
from kvcheck.core.live.own.plan import is_own_line
from kvcheck.core.stress.schedule import Plan, parse_line

if TYPE_CHECKING:
    from kvcheck.core.stress.shrinking import Shrunk


def shrink(
    what: Annotated[str, typer.Argument(help="A schedule line, or a finding as RUN#N or run.json#N.")],
    runs: Annotated[int, typer.Option(help="Most schedules to run.")] = 400,
    format_name: Format = "text",
    out: StoredIn = DEFAULT_OUT,
) -> int:
    """Run smaller schedules until none that is tried fails alike."""
    check_choice("--format", format_name, FORMATS)
    check_positive("--runs", runs)
    plan = _plan(what, lines_of(what, out))
    from kvcheck.core.stress.runner_rows import row_of
    from kvcheck.core.stress.shrinking import check_shrinkable
    from kvcheck.core.stress.shrinking import shrink as smallest

    row_of(plan).check_names(plan)
    check_plan(plan)
    check_shrinkable(plan)
    is_text = format_name == "text"
    if is_text:
        say(f" from    {plan.line()}")

    def tell(smaller: Plan) -> None:
        if is_text:
            say(f" fails   {smaller.line()}")

    shrunk = smallest(runner_of(plan), plan, runs=runs, tell=tell)
    verdict = Verdict.UNKNOWN if shrunk is None else Verdict.FAIL
    for line in _told(plan, shrunk) if is_text else [_to_json(plan, shrunk)]:
        say(line)
    if is_text:
        say(f" exit {verdict.exit_code}")
    return verdict.exit_code


def _plan(what: str, lines: list[str]) -> Plan:
    """The plan of the one line. Raises UsageError."""
    if len(lines) != 1:
        raise UsageError(f"shrink {what}: expected one finding, got {len(lines)}; name one, such as {what}#1")
    if is_live_line(lines[0]) or is_own_line(lines[0]):
        raise UsageError("shrink: expected a line of one process on a CPU, got one of a running server")
    return parse_line(lines[0])


def _told(plan: Plan, shrunk: Shrunk | None) -> list[str]:
    """Lines for the terminal."""
    if shrunk is None:
        wanted = "nothing" if plan.expect is None else f"no {plan.expect}"
        return [f" UNKNOWN  {plan.cell}: {wanted} was found, so there is nothing to shrink; see kvcheck replay"]
    last, finding = shrunk.last.plan, shrunk.finding
    if last == plan or shrunk.last is shrunk.first:
        head = f" NOT SMALLER  {last.cell}: {finding.code} {finding.message}"
        return [head, f"   none of {counted(shrunk.runs - 1, 'smaller schedule')} failed alike"]
    before, after = shrunk.requests
    answers = "every answer is yes" if not shrunk.refused else f"answered with no: {', '.join(shrunk.refused)}"
    return [
        f" SHRUNK  {last.cell}: {finding.code} {finding.message}",
        f"   {counted(after, 'request')}, was {before}; {answers}; {counted(shrunk.runs, 'schedule')} run",
        f"   next    kvcheck replay {shrunk.line}",
    ]


def _to_json(plan: Plan, shrunk: Shrunk | None) -> str:
    row: dict[str, object] = {"line": plan.line(), "verdict": "UNKNOWN" if shrunk is None else "FAIL"}
    if shrunk is not None:
        before, after = shrunk.requests
        row |= {"smallest": shrunk.line, "code": shrunk.finding.code, "runs": shrunk.runs}
        row |= {"requests_before": before, "requests": after, "refused": list(shrunk.refused)}
    return json.dumps(row)
