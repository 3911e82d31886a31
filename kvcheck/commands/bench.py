"""`kvcheck bench`: measures copies, waits and seals, compared with the plainest code that does the same.

Invariants:
- Slowness never fails. Exit 0 if each named case has a price and right output, 4 without a price, 1 for wrong output,
  130 if interrupted, with all measurements saved.
- Threads have no prices: exit 0 if each case was right in LEAST_ROUNDS rounds.
- Rows and sizes without a price are counted and named.
- A ratio is never shown without its noise floor.
- A missing measurement is "n/a", never 0. A time of threads is no price and is not shown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.asked import Asked
from kvcheck.commands.options import DEFAULT_OUT, Format, Out, Outputs, Reports, Seed, draw_seed, search, subject
from kvcheck.commands.terminal import columns
from kvcheck.core.base.errors import UsageError, WrongOutput
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Finding, ScenarioResult, Verdict
from kvcheck.core.base.rounds import LEAST_ROUNDS
from kvcheck.core.base.server_facts import SERVE
from kvcheck.core.report.prices import has_price, is_check, is_enough, limit_text, price_of
from kvcheck.core.report.screen import in_fields
from kvcheck.core.report.wording import fitted, folded
from kvcheck.core.run.cell import decided
from kvcheck.core.run.session import Session

if TYPE_CHECKING:
    from kvcheck.core.bench.run import BenchPlan

DEFAULT_SHAPE = "glm-5.1"
DEFAULT_MAX_TIME_S = 300.0
DEFAULT_ROUNDS = 40
ROUNDS_LEAST = 15
"""Rounds of a size before its precision is checked, unless fewer are allowed."""


Precision = Annotated[float, search(help="Stop a size when half its ratio's interval is at most this wide.")]
MaxTime = Annotated[float, search(help="Seconds for the whole run.")]
Rounds = Annotated[int, search(help="Most rounds of each size.")]
HEADS = ("case, arm", "time", "baseline", "ratio (95 %)", "floor", "verdict")
NATURAL = (23, 9, 23, 23, 8, 38)
"""Columns without a fold."""
NARROWEST = (20, 8, 13, 15, 7, 10)
GAP = 1
LEGEND = (
    "ratio: time of the arm over that of its baseline; below 1 is faster",
    "floor: how far the baseline differs from itself; a smaller difference is noise",
    "plus-...: work added to the baseline; its ratio is of both together",
)


def bench(
    ctx: typer.Context,
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="CASE", help="See kvcheck list cases. Default: all of them.")
    ] = None,
    shape: Annotated[str, subject(help="See kvcheck list shapes.")] = DEFAULT_SHAPE,
    device: Annotated[str, subject(help="cpu, threads, cuda or cuda:N.")] = "cpu",
    seed: Seed = None,
    precision: Precision = 0.03,
    max_time: MaxTime = DEFAULT_MAX_TIME_S,
    rounds: Rounds = DEFAULT_ROUNDS,
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
) -> int:
    asked = Asked.of(ctx)
    if SERVE in (cases or ()):
        raise UsageError(f"bench: {SERVE} is a command of its own; expected kvcheck bench {SERVE} URL")
    if rounds < LEAST_ROUNDS:
        raise UsageError(f"--rounds: expected at least {LEAST_ROUNDS}, since fewer give no price; got {rounds}")
    asked.check_places()
    drawn = draw_seed() if seed is None else seed
    plan = _plan(cases or [], shape, device, seed=drawn, precision=precision, max_time_s=max_time, rounds=rounds)
    session = asked.session(drawn=drawn, plan={name: getattr(plan, name) for name in plan.__slots__})
    head = (
        f"kvcheck {session.version}",
        f"seed {drawn}",
        f"run {session.run_id}",
        f"{counted(len(plan.cases), 'case')} on {device}",
        f"shape {shape}",
        f"at most {max_time:g} s",
    )
    for line in in_fields(head, columns()):
        session.say(line)
    try:
        interrupted = _measure(session, plan)
    except UsageError:  # a case refuses the shape
        session.withdraw()
        raise
    return asked.close(session, interrupted=interrupted)


def _plan(
    cases: list[str], shape: str, device: str, *, seed: int, precision: float, max_time_s: float, rounds: int
) -> BenchPlan:
    """Return the checked plan. Raises UsageError, and UnknownVerdict if the device is missing."""
    from kvcheck.core.bench import CASES
    from kvcheck.core.bench.clock import clock_for
    from kvcheck.core.bench.run import BenchPlan

    plan = BenchPlan(
        cases=tuple(dict.fromkeys(cases or CASES.names())),
        shape=shape,
        device=device,
        seed=seed,
        precision=precision,
        max_time_s=max_time_s,
        rounds_min=min(ROUNDS_LEAST, rounds),
        rounds_max=rounds,
    )
    clock_for(plan.device)
    return plan


def _measure(session: Session, plan: BenchPlan) -> bool:
    from kvcheck.core.bench.measure import machine, noise
    from kvcheck.core.bench.run import run_bench

    verdicts: dict[str, ScenarioResult] = {
        name: _result(name, plan.shape, "stopped before it was measured") for name in plan.cases
    }

    table = PriceTable(columns())

    def tell(row: BenchRow) -> None:
        session.bench.append(row)
        for line in table.lines(row):
            session.say(line)
        verdicts[row.case] = _priced(plan.shape, [each for each in session.bench if each.case == row.case])
        session.results = list(verdicts.values())
        session.save(complete=False)

    def late(case: str, sizes: tuple[str, ...]) -> None:
        left = f": {', '.join(sizes)}" if sizes else ""
        again = f"kvcheck bench {case} --shape {plan.shape} --device {plan.device} --max-time {2 * plan.max_time_s:g}"
        reason = f"its time was up before a first round{left}; next: {again}"
        if verdicts[case].verdict is Verdict.UNKNOWN:
            verdicts[case] = _result(case, plan.shape, reason)
        else:
            session.warnings.append(f"{case}: {reason}")
            session.untried.append(f"{case}: {reason}")

    session.facts = {"device": plan.device, "hardware": machine(), "noise_before": noise()}
    interrupted = False
    try:
        run_bench(plan, tell, late=late, progress=session.progress, learn=session.facts.update)
    except KeyboardInterrupt:
        interrupted = True
    except WrongOutput as error:
        case = str(error).partition("/")[0]
        verdicts[case] = _result(case, plan.shape, str(error), is_failed=True)
        finding = Finding(code="KV105", oracle="bench", scenario=case, shape=plan.shape, message=str(error))
        session.keep((finding,))
    session.facts["noise_after"] = noise()
    session.results = list(verdicts.values())
    usable = sum(map(is_enough, session.bench))
    if usable < len(session.bench):
        rows = counted(len(session.bench), "row")
        what = "checked" if any(map(is_check, session.bench)) else "with a price"
        text = f"{usable} of {rows} {what}: the others have fewer than {LEAST_ROUNDS} rounds"
        session.warnings.append(text)
    return interrupted


def _priced(shape: str, rows: list[BenchRow]) -> ScenarioResult:
    case, rounds = rows[-1].case, len(rows[-1].ratios)
    if any(map(is_enough, rows)):
        return _result(case, shape, None, rounds=rounds)
    most = max(len(row.ratios) for row in rows)
    what = "was checked" if is_check(rows[-1]) else "has a price"
    reason = f"none of its rows {what}: expected {LEAST_ROUNDS} rounds or more, got {most}; use a larger --max-time"
    return _result(case, shape, reason, rounds=rounds)


def _result(case: str, shape: str, reason: str | None, *, rounds: int = 0, is_failed: bool = False) -> ScenarioResult:
    verdict, code = decided(is_failed=is_failed, reason=reason)
    code = "KV105" if is_failed else code
    return ScenarioResult(id=case, shape=shape, verdict=verdict, code=code, reason=reason, schedules=rounds)


class PriceTable:
    """The lines of a table that grows. A case is named once, and the share of a limit once for each size."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._widths = fitted(NATURAL, NARROWEST, width - 1, GAP)
        self._last: tuple[str, str] | None = None
        self._limit: tuple[str, str, str] | None = None

    def lines(self, row: BenchRow) -> list[str]:
        lines: list[str] = []
        if self._last is None and not is_check(row):
            lines += [*(f" {text}" for text in LEGEND), "", *self._folded(HEADS)]
        if self._last is None or self._last[0] != row.case:
            lines += textwrap.wrap(
                f" {row.case}, {row.size}" + (f": {row.note}" if row.note else ""),
                self._width - 1,
                subsequent_indent=" ",
            )
        elif self._last[1] != row.size:
            lines.append(f" {'':{len(row.case)}}  {row.size}")
        lines += self._folded(price_cells(row))
        if (limit := limit_text(row)) is not None and (row.case, row.size, limit) != self._limit:
            lines.append(f"     reaches {limit}")
            self._limit = row.case, row.size, limit
        self._last = row.case, row.size
        return lines

    def _folded(self, cells: Sequence[str]) -> list[str]:
        return folded(cells, self._widths, margin=1, gap=GAP)


def price_cells(row: BenchRow) -> tuple[str, ...]:
    if is_check(row):
        return f"  {row.arm}", "", row.baseline, "", "", f"right in {counted(len(row.ratios), 'round')}"
    price = price_of(row, None)
    noise = ", noisy" if row.status == "noisy" and has_price(row) else ""
    return (
        f"  {row.arm}",
        f"{'+' if row.is_added else ''}{price.cost}",
        row.baseline,
        price.ratio,
        price.floor,
        price.verdict.removeprefix("n/a: ") + noise,
    )
