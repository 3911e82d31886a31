"""The gate's judgement on overhead: is an arm slower than its budget lets it be, or can that not be told.

Each row is judged against its budget by the part of it that is used up: 1.0 is all, and a round gives one number.

- OK: the upper end of the interval, with the noise floor added, is less than `fail_over` above the budget.
- SLOWER: the middle is `fail_over` or more above it, and the lower end is above it by more than `tol` and by more than
  the floor; in two separate measurements, the last of them made by the gate itself, while no other was OK.
- INCONCLUSIVE: all else; also measurements that contradict each other, and fewer than six rounds.

A row that is not OK in its record is measured again, at most MEASURED_AGAIN times. Of the gate's own rounds, SLOWER has
also to be said by a sign test, with Holm's correction over all gated rows, at the level of one end of the interval; so
a set of rows that are within their budgets is called SLOWER at most so often, and much less often in fact, since the
recorded rounds have to say it too. A share of a physical limit comes without rounds: both its intervals have to say it,
each of them wrong at most once in forty times.

Invariants:
- What is over its budget says so, whatever `tol` and `fail_over` let pass.
- Every row that has an interval says from where on it would have been called SLOWER.
- Sees records, budgets and what `measure` returns; runs nothing, reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.base.rounds import LEAST_ROUNDS, TAIL, holm, ratio_interval, sign_p

ADVISED_ROWS = 8
MEASURED_AGAIN = 2
MOST_SHARE = 10.0
LEAST = 1e-12
"""Ratios and shares from here down were not measured: no clock is that fine, and what is divided by them has no end."""


class Overhead(Enum):
    """What is said of a gated row; the values are those of the gate's JSON."""

    OK = "ok"
    INCONCLUSIVE = "inconclusive"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True)
class Rules:
    """tol: how far above its budget a row may be without being called slower; fail_over: where it fails. Shares."""

    tol: float = 0.03
    fail_over: float = 0.10

    def __post_init__(self) -> None:
        if not 0 <= self.tol <= self.fail_over <= MOST_SHARE:  # written so that nan is refused
            raise UsageError(
                f"--tol and --fail-over: expected 0 <= tol <= fail-over <= {MOST_SHARE:g}, as shares such as 0.03; "
                f"got {self.tol:g} and {self.fail_over:g}"
            )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of a stored run."""

    run_id: str
    row: BenchRow


@dataclass(frozen=True, slots=True)
class Gated:
    """A row and one bound that it has to keep."""

    recorded: Recorded
    bound: str
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One measurement of a gated row, judged by itself.

    measured: the ratio, or share of the limit. used: the part of the budget that it takes, 1.0 is all. p: of the sign
    test, after Holm; None where there are no rounds, or where it was not asked for.
    """

    measured: Interval
    used: Interval
    rounds: int
    floor: float
    verdict: Overhead
    p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedRow:
    """What the gate says of one row and one bound.

    looks: the recorded measurement, then the gate's own. sees: the ratio, or share of the limit, from which on a
    measurement like the last one calls the row SLOWER; None where it has no interval. sees_change: the same as a change
    of the time that was measured, 0.2 for a fifth more.
    """

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
    looks: tuple[Look, ...]
    sees: float | None
    sees_change: float | None
    notes: tuple[str, ...]

    @property
    def last(self) -> Look:
        """The newest measurement."""
        return self.looks[-1]


Measure = Callable[[Sequence[Recorded]], Sequence[BenchRow | str]]
"""Fresh rounds of these rows, in their order; or why there are none."""


@dataclass(slots=True)
class _Case:
    """A gated row while it is decided."""

    gated: Gated
    looks: list[Look]
    notes: list[str] = field(default_factory=list)
    is_closed: bool = False

    def wants_more(self) -> bool:
        """Whether another measurement could still change what is said."""
        said = [look.verdict for look in self.looks]
        if self.is_closed or Overhead.OK in said or len(said) > MEASURED_AGAIN or said.count(Overhead.SLOWER) > 1:
            return False
        return len(said) == 1 or Overhead.SLOWER in said  # with one measurement left, two have to agree already

    def verdict(self) -> Overhead:
        """SLOWER needs two of a kind and no OK; OK needs nobody who said SLOWER."""
        said = [look.verdict for look in self.looks]
        slower = said.count(Overhead.SLOWER)
        if Overhead.OK in said:
            return Overhead.INCONCLUSIVE if slower else Overhead.OK
        return Overhead.SLOWER if slower > 1 else Overhead.INCONCLUSIVE


def decide(gated: Sequence[Gated], rules: Rules, measure: Measure) -> tuple[tuple[GatedRow, ...], bool]:
    """The verdict on each gated row, and whether measuring came to its end or was interrupted."""
    cases = [_Case(each, [look(each, each.recorded.row, rules)]) for each in gated]
    is_complete = True
    try:
        while wanted := [at for at, case in enumerate(cases) if case.wants_more()]:
            answers = measure([cases[at].gated.recorded for at in wanted])
            _look_again(cases, dict(zip(wanted, answers, strict=True)), rules)
    except KeyboardInterrupt:
        is_complete = False
    return tuple(_row(case, rules) for case in cases), is_complete


def look(gated: Gated, row: BenchRow, rules: Rules) -> Look:
    """One measurement, judged by its interval alone."""
    if gated.bound == "max_ratio":
        measured = ratio_interval([math.log(ratio) for ratio in row.ratios])
        used = _scaled(measured, lambda ratio: ratio / gated.budget)
    else:
        assert row.limit_ratio is not None, "fault() refuses rows without a limit"
        measured = row.limit_ratio
        turned = _scaled(measured, lambda share: gated.budget / share)
        used = Interval(turned.est, turned.hi, turned.lo)  # a smaller share of the limit uses more of the budget
    verdict = _said(used, row.floor, rules)
    return Look(measured=measured, used=used, rounds=len(row.ratios), floor=row.floor, verdict=verdict)


def fault(row: BenchRow, bound: str) -> str | None:
    """Why this row cannot be judged by this bound; None if it can."""
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


def _said(used: Interval, floor: float, rules: Rules) -> Overhead:
    if used.lo is None or used.hi is None:
        return Overhead.INCONCLUSIVE
    if used.hi - 1 + floor < rules.fail_over:
        return Overhead.OK
    if used.lo - 1 > max(rules.tol, floor) and used.est - 1 >= rules.fail_over:
        return Overhead.SLOWER
    return Overhead.INCONCLUSIVE


def _look_again(cases: Sequence[_Case], answers: Mapping[int, BenchRow | str], rules: Rules) -> None:
    """Add a look to each case that was measured again; SLOWER only where the sign tests of all together allow it."""
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
        seen = look(cases[at].gated, row, rules)
        p = corrected.get(at)
        if seen.verdict is Overhead.SLOWER and p is not None and p > TAIL:
            seen = replace(seen, verdict=Overhead.INCONCLUSIVE)
        cases[at].looks.append(replace(seen, p=p))


def _p(case: _Case, row: BenchRow | None, rules: Rules) -> float:
    """Of the sign test that a row is above what is let pass; 1.0 where nothing is claimed of it."""
    if row is None:
        return 1.0
    return sign_p(row.ratios, case.gated.budget * (1 + max(rules.tol, row.floor)))


def _row(case: _Case, rules: Rules) -> GatedRow:
    row, last = case.gated.recorded.row, case.looks[-1]
    seen = _seen(last, rules)
    is_ratio = case.gated.bound == "max_ratio"
    return GatedRow(
        run_id=case.gated.recorded.run_id,
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
        looks=tuple(case.looks),
        sees=None if seen is None else case.gated.budget * seen if is_ratio else case.gated.budget / seen,
        sees_change=None if seen is None else seen / last.used.est - 1,
        notes=(*_notes(case, rules), *case.notes),
    )


def _seen(last: Look, rules: Rules) -> float | None:
    """The part of the budget from which on such a measurement is called SLOWER, even when it turns out low."""
    if last.used.lo is None:
        return None
    spread = last.used.est / last.used.lo
    return max(1 + rules.fail_over, (1 + max(rules.tol, last.floor)) * spread) * spread


def _notes(case: _Case, rules: Rules) -> list[str]:
    last, verdict = case.looks[-1], case.verdict()
    over = last.used.est - 1
    notes = []
    if last.used.lo is None:
        notes.append(f"{last.rounds} rounds: an interval needs {LEAST_ROUNDS}")
    if verdict is Overhead.SLOWER:
        said = sum(each.verdict is Overhead.SLOWER for each in case.looks)
        confirmed = f"{over:.0%} over its budget, confirmed: {said} of {len(case.looks)} measurements"
        notes.append(f"{confirmed}; next: kvcheck bench {case.gated.recorded.row.case}")
    elif over > 0:
        let = ", within --fail-over" if over < rules.fail_over else ""
        notes.append(f"{over:.1%} over its budget{let}")
    if verdict is Overhead.INCONCLUSIVE and len(case.looks) > 1:
        notes.append(f"measured {len(case.looks)} times: {', '.join(each.verdict.name for each in case.looks)}")
    if verdict is Overhead.INCONCLUSIVE and last.floor > rules.tol:
        notes.append(f"noise floor {last.floor:.1%}: smaller differences say nothing")
    return notes
