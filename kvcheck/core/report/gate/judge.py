"""The gate's verdict on overhead: whether an arm is slower than its budget allows.

Each row is judged by the used part of its budget; 1.0 is all of it. Each round gives one such number.

- OK: the upper end of the interval, plus the noise floor, is less than `fail_over` above the budget.
- SLOWER: the estimate is `fail_over` or more above the budget, and the lower end is above it by more than `tol` and by
  more than the floor. Two measurements must agree, the last of them made by the gate, and none may be OK.
- INCONCLUSIVE: everything else, such as fewer than six rounds.

A row that is not OK in its record is measured again, at most MEASURED_AGAIN times. In the gate's own rounds, SLOWER
also needs a sign test, with Holm's correction over all gated rows, at the level of one end of the interval. So a set of
rows within their budgets has a SLOWER at most that often. A share of a physical limit has no rounds: both its intervals
must agree, each wrong at most once in forty times.

Invariants:
- A row over its budget has a note of it, whatever `tol` and `fail_over` allow.
- This module runs nothing and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.base.rounds import LEAST_ROUNDS, TAIL, holm, ratio_interval, sign_p
from kvcheck.core.report.prices import bench_command

ADVISED_ROWS = 8
MEASURED_AGAIN = 2
MOST_SHARE = 10.0
LEAST = 1e-12
"""Smaller ratios and shares were not measured: no clock is that fine."""


class Overhead(Enum):
    """The verdict on a gated row; the values are those of the gate's JSON."""

    OK = "ok"
    INCONCLUSIVE = "inconclusive"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True)
class Rules:
    """Shares of a budget. tol: up to this excess a row is never SLOWER. fail_over: from this excess on it fails."""

    tol: float = 0.03
    fail_over: float = 0.10

    def __post_init__(self) -> None:
        if not 0 <= self.tol <= self.fail_over <= MOST_SHARE:  # written so that nan is refused
            raise UsageError(
                f"--tol and --fail-over: expected 0 <= tol <= fail-over <= {MOST_SHARE:g}, as shares such as 0.03; "
                f"got {self.tol:g} and {self.fail_over:g}"
            )


@dataclass(frozen=True, slots=True)
class StoredRow:
    run_id: str
    row: BenchRow


@dataclass(frozen=True, slots=True)
class BudgetedRow:
    stored: StoredRow
    bound: str
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """measured: the ratio, or share of the limit. budget_used: 1.0 is the whole budget. p: of the sign test, after
    Holm's correction; None for a share of a limit and for the recorded measurement."""

    measured: Interval
    budget_used: Interval
    rounds: int
    floor: float
    verdict: Overhead
    p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedRow:
    """measurements: the recorded one, then the gate's own. slower_from: the value from which a measurement like the
    last one is SLOWER; None without an interval. slower_from_change: the same as a relative change of the measured
    time."""

    run_id: str
    id: str
    case: str
    arm: str
    baseline: str
    size: str
    shape: str | None
    device: str
    bound: str
    budget: float
    verdict: Overhead
    measurements: tuple[Measurement, ...]
    slower_from: float | None
    slower_from_change: float | None
    notes: tuple[str, ...]

    @property
    def last(self) -> Measurement:
        return self.measurements[-1]


Measure = Callable[[Sequence[StoredRow]], Sequence[BenchRow | str]]
"""Measures new rounds of these rows, in their order; a str is the reason for a missing measurement."""


@dataclass(slots=True)
class _Case:
    gated: BudgetedRow
    measurements: list[Measurement]
    notes: list[str] = field(default_factory=list)
    is_closed: bool = False

    def wants_more(self) -> bool:
        verdicts = [each.verdict for each in self.measurements]
        if self.is_closed or Overhead.OK in verdicts or verdicts.count(Overhead.SLOWER) > 1:
            return False
        # With one measurement left, SLOWER needs one of the two before it.
        return len(verdicts) == 1 or (len(verdicts) <= MEASURED_AGAIN and Overhead.SLOWER in verdicts)

    def verdict(self) -> Overhead:
        verdicts = [each.verdict for each in self.measurements]
        slower = verdicts.count(Overhead.SLOWER)
        if Overhead.OK in verdicts:
            return Overhead.INCONCLUSIVE if slower else Overhead.OK
        return Overhead.SLOWER if slower > 1 else Overhead.INCONCLUSIVE


def decide(gated: Sequence[BudgetedRow], rules: Rules, measure: Measure) -> tuple[tuple[GatedRow, ...], bool]:
    """Return the verdict on each gated row, and False if measuring was interrupted."""
    cases = [_Case(each, [measurement_of(each, each.stored.row, rules)]) for each in gated]
    is_complete = True
    try:
        while wanted := [at for at, case in enumerate(cases) if case.wants_more()]:
            answers = measure([cases[at].gated.stored for at in wanted])
            _add_measurements(cases, dict(zip(wanted, answers, strict=True)), rules)
    except KeyboardInterrupt:
        is_complete = False
    return tuple(_row(case, rules) for case in cases), is_complete


def measurement_of(gated: BudgetedRow, row: BenchRow, rules: Rules) -> Measurement:
    if gated.bound == "max_ratio":
        measured = ratio_interval([math.log(ratio) for ratio in row.ratios])
        budget_used = _scaled(measured, lambda ratio: ratio / gated.budget)
    else:
        assert row.limit_ratio is not None, "fault() refuses rows without a limit"
        measured = row.limit_ratio
        turned = _scaled(measured, lambda share: gated.budget / share)
        budget_used = Interval(turned.est, turned.hi, turned.lo)  # a smaller share of the limit uses more of the budget
    verdict = _verdict(budget_used, row.floor, rules)
    return Measurement(
        measured=measured, budget_used=budget_used, rounds=len(row.ratios), floor=row.floor, verdict=verdict
    )


def fault(row: BenchRow, bound: str) -> str | None:
    """Return the reason why the bound cannot judge this row; None if it can."""
    if row.status == "unknown":
        return f"it was not measured: {row.note or 'no reason was recorded'}"
    if row.floor < 0:
        return f"expected a noise floor of at least 0, got {row.floor:g}"
    if bound == "max_ratio":
        if not row.ratios:
            return "it has no rounds"
        return None if min(row.ratios) > LEAST else f"expected ratios above 0, got {min(row.ratios):g}"
    if row.limit_ratio is None:
        return "no physical limit was measured beside it"
    ends = [end for end in (row.limit_ratio.lo, row.limit_ratio.est, row.limit_ratio.hi) if end is not None]
    if ends != sorted(ends):
        return f"expected a share of the limit inside its interval, got {', '.join(f'{end:g}' for end in ends)}"
    return None if ends[0] > LEAST else f"expected a share of the limit above 0, got {ends[0]:g}"


def _scaled(interval: Interval, scale: Callable[[float], float]) -> Interval:
    lo, hi = (None if end is None else scale(end) for end in (interval.lo, interval.hi))
    return Interval(scale(interval.est), lo, hi)


def _verdict(budget_used: Interval, floor: float, rules: Rules) -> Overhead:
    if budget_used.lo is None or budget_used.hi is None:
        return Overhead.INCONCLUSIVE
    if budget_used.hi - 1 + floor < rules.fail_over:
        return Overhead.OK
    if budget_used.lo - 1 > max(rules.tol, floor) and budget_used.est - 1 >= rules.fail_over:
        return Overhead.SLOWER
    return Overhead.INCONCLUSIVE


def _add_measurements(cases: Sequence[_Case], answers: Mapping[int, BenchRow | str], rules: Rules) -> None:
    """Add the new measurements; SLOWER only if the corrected sign test allows it."""
    fresh: dict[int, BenchRow] = {}
    for at, answer in answers.items():
        case = cases[at]
        reason = answer if isinstance(answer, str) else fault(answer, case.gated.bound)
        if reason is None:
            assert isinstance(answer, BenchRow), "a row, since it has no fault"
            fresh[at] = answer
        else:
            case.notes.append(f"not measured again: {reason}")
            case.is_closed = True
    tested = [at for at, case in enumerate(cases) if case.gated.bound == "max_ratio"]
    corrected = dict(zip(tested, holm([_p(cases[at], fresh.get(at), rules) for at in tested]), strict=True))
    for at, row in fresh.items():
        seen = measurement_of(cases[at].gated, row, rules)
        p = corrected.get(at)
        if seen.verdict is Overhead.SLOWER and p is not None and p > TAIL:
            seen = replace(seen, verdict=Overhead.INCONCLUSIVE)
        cases[at].measurements.append(replace(seen, p=p))


def _p(case: _Case, row: BenchRow | None, rules: Rules) -> float:
    if row is None:
        return 1.0
    return sign_p(row.ratios, case.gated.budget * (1 + max(rules.tol, row.floor)))


def _row(case: _Case, rules: Rules) -> GatedRow:
    row, last = case.gated.stored.row, case.measurements[-1]
    seen = _slower_from(last, rules)
    is_ratio = case.gated.bound == "max_ratio"
    return GatedRow(
        run_id=case.gated.stored.run_id,
        id=row.id,
        case=row.case,
        arm=row.arm,
        baseline=row.baseline,
        size=row.size,
        shape=row.shape,
        device=row.device,
        bound=case.gated.bound,
        budget=case.gated.budget,
        verdict=case.verdict(),
        measurements=tuple(case.measurements),
        slower_from=None if seen is None else case.gated.budget * seen if is_ratio else case.gated.budget / seen,
        slower_from_change=None if seen is None else seen / last.budget_used.est - 1,
        notes=(*_notes(case, rules), *case.notes),
    )


def _slower_from(last: Measurement, rules: Rules) -> float | None:
    """The part of the budget from which such a measurement is SLOWER even if it turns out low."""
    if last.budget_used.lo is None:
        return None
    spread = last.budget_used.est / last.budget_used.lo
    return max(1 + rules.fail_over, (1 + max(rules.tol, last.floor)) * spread) * spread


def _notes(case: _Case, rules: Rules) -> list[str]:
    last, verdict = case.measurements[-1], case.verdict()
    over = last.budget_used.est - 1
    notes = []
    if last.budget_used.lo is None:
        notes.append(f"{counted(last.rounds, 'round')}: an interval needs {LEAST_ROUNDS}")
    if verdict is Overhead.SLOWER:
        slower = sum(each.verdict is Overhead.SLOWER for each in case.measurements)
        confirmed = f"{over:.0%} over its budget, confirmed: {slower} of {len(case.measurements)} measurements"
        notes.append(f"{confirmed}; next: {bench_command(case.gated.stored.row.case)}")
    elif over > 0:
        let = ", within --fail-over" if over < rules.fail_over else ""
        notes.append(f"{over:.1%} over its budget{let}")
    if verdict is Overhead.INCONCLUSIVE and len(case.measurements) > 1:
        verdicts = ", ".join(each.verdict.name for each in case.measurements)
        notes.append(f"measured {len(case.measurements)} times: {verdicts}")
    if verdict is Overhead.INCONCLUSIVE and last.floor > rules.tol:
        notes.append(f"noise floor {last.floor:.1%}: smaller differences cannot be measured")
    return notes
