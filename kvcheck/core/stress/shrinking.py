"""Shrinking: looks for a smaller schedule with the same failure.

    shape       the micro shape of the same model, in the same variant of the scenario
    requests    as few as still fail, of two pages each if that still fails
    pages       the fewest tried for a request that still fail
    faults      none, else as few kinds as still fail
    answers     "yes" to everything, else as few "no" as still fail
    extras      without the audit of footprints, if it fails without it

Invariants:
- Two schedules fail alike if one oracle gives both the same code, under no condition, and both or neither name a
  buffer.
- A smaller schedule counts once it has run and failed alike. No decision reads a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import ANSWERS, NO_EXTRAS, Plan
from kvcheck.core.run.turns import answers_text, parse_answers
from kvcheck.core.stress.plan_scenario import faults_of, faults_text, pages_of, scenario_of, variant_of
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios.scenario import FAULTS
from kvcheck.core.stress.workload import WORDS
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named

ALIKE, OTHERS = 3, 9
"""Workloads of a candidate that are tried before it is dropped: so many of the plan's own variant, then of so many
others. A smaller one may lack the cause of the failure."""
FEW = 2
"""Pages of a request, few enough to be followed by eye, and enough for a page's end."""
MANY: dict[tuple[int, int | None], int] = {(2, FEW): 120, (2, FEW + 1): 60}
"""Workloads of other variants of these sizes: each takes little time, and few of them come back to a prefix."""
SIZES = ((1, FEW), *MANY, *((requests, None) for requests in (1, 2, 3, 4, 6, 8, 12)))
"""Numbers of requests to try, with the most pages of each."""
PAGES = (1, 2, 3, 4, 6)

Likeness = tuple[str, str, bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """last: the smallest run that fails alike. requests, pages (the most of one request): before and after."""

    first: Outcome
    last: Outcome
    finding: Finding
    requests: tuple[int, int]
    pages: tuple[int, int]
    runs: int

    @property
    def line(self) -> str:
        return self.last.plan.line()

    @property
    def refused(self) -> tuple[str, ...]:
        plan = self.last.plan
        return parse_answers(plan.choices) if plan.strategy == ANSWERS and plan.choices is not None else ()


def check_shrinkable(plan: Plan) -> None:
    """Raise UsageError unless the line is of one process on a CPU with drawn requests."""
    if plan.is_in_process and not plan.on_device and plan.trace is None:
        return
    next_step = f"kvcheck replay {plan.line()}"
    if plan.trace is not None:
        got = f"trace={plan.trace}"
    elif plan.on_device:
        got = f"device={plan.device}"
        next_step = f"kvcheck shrink {_on_cpu(plan).line()}, the same work on a CPU"
    elif plan.has_rank_processes:
        got = f"transport={plan.transport}"
    else:
        got = f"target={plan.target}"
    raise UsageError(f"shrink: expected a line of one process on a CPU without a trace, got {got}; next: {next_step}")


def _on_cpu(plan: Plan) -> Plan:
    """A missing order may show there as another code."""
    return dataclasses.replace(plan, backend="simulated", device="cpu", strategy="portfolio", choices=None, expect=None)


def shrink(runner: ScheduleRunner, plan: Plan, *, runs: int, tell: Callable[[Plan], None]) -> Shrunk | None:
    """Return the smallest schedule found that fails like the plan; None if the plan does not fail, or not as it
    expects.

    runs: most schedules to run, from 1 on. tell: called with each smaller plan when found, so that an interrupted
    search keeps the last. Raises UsageError if `check_shrinkable` does.
    """
    check_shrinkable(plan)
    return _Shrinking(runner, runs, tell).of(plan)


def likeness(finding: Finding) -> Likeness:
    return finding.oracle, finding.code, finding.buffer is not None


class _Shrinking:
    def __init__(self, runner: ScheduleRunner, runs: int, tell: Callable[[Plan], None]) -> None:
        self._runner, self._left, self._most, self._tell = runner, runs, runs, tell
        self._wanted: Likeness | None = None

    def of(self, plan: Plan) -> Shrunk | None:
        first = self._run(plan)
        found = None if first is None else _failure(first, plan.expect)
        if first is None or found is None:
            return None
        self._wanted = likeness(found)
        best = self._smaller(plan) or first
        best = self._fewer_pages(best)
        best = self._fewer_faults(best)
        best = self._fewer_answers(best)
        best = self._without_extras(best)
        last = next((each for each in _told(best) if likeness(each) == self._wanted), None)
        assert last is not None, "each run that is kept has failed alike"
        before, after = (self._runner.workloads.of(each.plan)[0] for each in (first, best))
        shapes = [shape_named(each.plan.shape) for each in (first, best)]
        return Shrunk(
            first=first,
            last=best,
            finding=last,
            requests=(len(before.jobs), len(after.jobs)),
            pages=(pages_of(before, shapes[0]), pages_of(after, shapes[1])),
            runs=self._most - self._left,
        )

    def _run(self, plan: Plan) -> Outcome | None:
        if not self._left:
            return None
        self._left -= 1
        return self._runner.run(plan)

    def _fails(self, plan: Plan) -> Outcome | None:
        """The outcome of a run that fails alike with the answers of its plan, which are written out."""
        outcome = self._run(plan)
        if outcome is None or outcome.divergence is not None or outcome.unjudged is not None:
            return None
        if not any(likeness(each) == self._wanted for each in _told(outcome)):
            return None
        assert self._wanted is not None
        written = dataclasses.replace(plan, choices=answers_text(outcome.refused), expect=self._wanted[1])
        self._tell(written)
        return dataclasses.replace(outcome, plan=written)

    def _smaller(self, plan: Plan) -> Outcome | None:
        load = self._runner.workloads.of(plan)[0]
        most, held = len(load.jobs), pages_of(load, shape_named(plan.shape))
        for shape in dict.fromkeys((_micro(plan.shape), plan.shape)):
            for requests, pages in SIZES:
                is_smaller = requests < most or (requests == most and pages is not None and pages < held)
                if not (is_smaller or shape != plan.shape) or (pages is not None and plan.decoder != WORDS):
                    continue
                for number, choices in _tries(plan, shape, MANY.get((requests, pages), OTHERS)):
                    small = dataclasses.replace(
                        plan,
                        shape=shape,
                        schedule=number,
                        requests=requests,
                        pages=pages,
                        strategy=ANSWERS,
                        choices=choices,
                    )
                    if (outcome := self._fails(small)) is not None:
                        return outcome
        return None

    def _fewer_pages(self, best: Outcome) -> Outcome:
        plan = best.plan
        if plan.strategy != ANSWERS or plan.decoder != WORDS:
            return best
        held = pages_of(self._runner.workloads.of(plan)[0], shape_named(plan.shape))
        for pages in (each for each in PAGES if each < held):
            if (outcome := self._fails(dataclasses.replace(plan, pages=pages))) is not None:
                return outcome
        return best

    def _fewer_faults(self, best: Outcome) -> Outcome:
        if best.plan.strategy != ANSWERS or best.plan.decoder != WORDS:
            return best
        kept = faults_of(best.plan.faults) if best.plan.faults is not None else frozenset(FAULTS)
        for kinds in (frozenset[str](), *({each} for each in FAULTS)):
            if kinds < kept and (outcome := self._fails(_with_faults(best.plan, frozenset(kinds)))) is not None:
                return outcome
        for each in FAULTS:
            if each in kept and (outcome := self._fails(_with_faults(best.plan, kept - {each}))) is not None:
                best, kept = outcome, kept - {each}
        return best

    def _fewer_answers(self, best: Outcome) -> Outcome:
        """Leave out "no" after "no", halves first, until each one left is needed."""
        plan = best.plan
        if plan.strategy != ANSWERS or plan.choices is None:
            return best
        refused = parse_answers(plan.choices)
        size = max(1, len(refused) // 2)
        while refused:
            for start in range(0, len(refused), size):
                fewer = refused[:start] + refused[start + size :]
                if (outcome := self._fails(dataclasses.replace(plan, choices=answers_text(fewer)))) is not None:
                    best, refused = outcome, fewer
                    break
            else:
                if size == 1:
                    return best
                size //= 2
                continue
            size = max(1, min(size, len(refused)))
        return best

    def _without_extras(self, best: Outcome) -> Outcome:
        if best.plan.extras is not None or best.plan.strategy != ANSWERS:
            return best
        return self._fails(dataclasses.replace(best.plan, extras=NO_EXTRAS)) or best


def _told(outcome: Outcome) -> Iterator[Finding]:
    return (each for each in outcome.findings if each.condition is None)


def _failure(outcome: Outcome, code: str | None) -> Finding | None:
    found = next((each for each in _told(outcome) if code in (None, each.code)), None)
    alike = (each for each in _told(outcome) if found is not None and each.code == found.code and each.buffer)
    return next(alike, found)


def _with_faults(plan: Plan, kinds: frozenset[str]) -> Plan:
    return dataclasses.replace(plan, faults=faults_text(kinds))


def _micro(shape: str) -> str:
    small = f"{shape.rpartition('-')[0]}-micro"
    return small if small in MICRO_SHAPES else shape


def _tries(plan: Plan, shape: str, others: int) -> list[tuple[int, str | None]]:
    alike, rest = _numbers(plan, shape, others)
    tries: list[tuple[int, str | None]] = [(number, choices) for choices in ("none", None) for number in alike]
    return [*tries, *((number, (None, "none")[at % 2]) for at, number in enumerate(rest))]


def _numbers(plan: Plan, shape: str, most: int) -> tuple[list[int], list[int]]:
    """Schedule numbers of another shape with the plan's variant, and at most `most` with others."""
    count = scenario_of(plan).table.variants
    alike: list[int] = []
    others: list[int] = []
    for number in range(max(count * ALIKE, most)):
        variant = variant_of(dataclasses.replace(plan, shape=shape, schedule=number))
        (others if (variant - variant_of(plan)) % count else alike).append(number)
    return alike[:ALIKE] or [plan.schedule], others[:most]
