"""Shrinking: looks for a smaller schedule that fails as a given one does.

    shape       the micro shape of the same model, in the same variant of the scenario
    requests    as few as still fail
    answers     "yes" to everything, else as few "no" as still fail
    extras      without illegal calls and without the audit of footprints, if it fails without them

Invariants:
- Two schedules fail alike if one oracle gives both the same code, under no condition.
- A smaller schedule counts once it has run and failed alike. Nothing is claimed about those that did not run.
- Each run is counted, and there are no more than were allowed. No decision reads a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Finding
from kvcheck.core.stress.answers import answers_text, parse_answers
from kvcheck.core.stress.plan_scenario import scenario_of
from kvcheck.core.stress.runner import Outcome, ScheduleRunner
from kvcheck.core.stress.schedule import ANSWERS, NO_EXTRAS, Kind, Plan
from kvcheck.core.workload.shapes import MICRO_SHAPES

ALIKE, OTHERS = 3, 9
"""Workloads of a candidate that are tried before it is left: so many of the plan's own variant, then of so many others.
A smaller one may lack what leads to the failure."""
REQUESTS = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of requests that are tried, the smallest first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What came of it. first: the run of the line that was given. last: the smallest run that fails alike. finding:
    how both fail, as told by the last. requests: before and after. runs: how many schedules ran."""

    first: Outcome
    last: Outcome
    finding: Finding
    requests: tuple[int, int]
    runs: int

    @property
    def line(self) -> str:
        """The line of the smallest run."""
        return self.last.plan.line()

    @property
    def refused(self) -> tuple[str, ...]:
        """What the smallest run answers with "no"; of another strategy, nothing is known."""
        plan = self.last.plan
        return parse_answers(plan.choices) if plan.strategy == ANSWERS and plan.choices is not None else ()


def check_shrinkable(plan: Plan) -> None:
    """Raises UsageError for a line that is not of one process on a CPU with requests that are drawn."""
    if plan.kind is not Kind.SCHEDULE or plan.backend == "cuda" or plan.trace is not None:
        what = f"trace={plan.trace}" if plan.trace is not None else f"a line of {plan.cell}"
        raise UsageError(
            f"shrink: expected a line of one process on a CPU without a trace, got {what}; run it with kvcheck replay"
        )


def shrink(runner: ScheduleRunner, plan: Plan, *, runs: int, tell: Callable[[Plan], None]) -> Shrunk | None:
    """The smallest schedule found that fails as the plan does; None if the plan does not fail, or not as it expects.

    runs: most schedules to run, from 1 on. tell: is told of each smaller plan as it is found, so that one who stops the
    search keeps the last. Raises UsageError for a plan that `check_shrinkable` refuses.
    """
    check_shrinkable(plan)
    return _Shrinking(runner, runs, tell).of(plan)


class _Shrinking:
    """One search. _wanted: oracle and code of the failure, once it is known."""

    def __init__(self, runner: ScheduleRunner, runs: int, tell: Callable[[Plan], None]) -> None:
        self._runner, self._left, self._most, self._tell = runner, runs, runs, tell
        self._wanted: tuple[str, str] | None = None

    def of(self, plan: Plan) -> Shrunk | None:
        first = self._run(plan)
        found = None if first is None else _failure(first, plan.expect)
        if first is None or found is None:
            return None
        self._wanted = found.oracle, found.code
        best = self._smaller(plan) or first
        best = self._fewer_answers(best)
        best = self._without_extras(best)
        last = _failure(best, found.code)
        assert last is not None, "each run that is kept has failed alike"
        before, after = (len(self._runner.workloads.of(each.plan)[1]) for each in (first, best))
        return Shrunk(first=first, last=best, finding=last, requests=(before, after), runs=self._most - self._left)

    def _run(self, plan: Plan) -> Outcome | None:
        """The outcome; None where no run is left."""
        if not self._left:
            return None
        self._left -= 1
        return self._runner.run(plan)

    def _fails(self, plan: Plan) -> Outcome | None:
        """The outcome of a run that fails alike and gives the answers that its plan names, with these written out; None
        of any other run."""
        outcome = self._run(plan)
        if outcome is None or outcome.divergence is not None or outcome.unjudged is not None:
            return None
        if not any((each.oracle, each.code) == self._wanted for each in _told(outcome)):
            return None
        assert self._wanted is not None
        written = dataclasses.replace(plan, choices=answers_text(outcome.refused), expect=self._wanted[1])
        self._tell(written)
        return dataclasses.replace(outcome, plan=written)

    def _smaller(self, plan: Plan) -> Outcome | None:
        """The first candidate that fails alike: the fewest requests, and "yes" to everything before chance."""
        most = len(self._runner.workloads.of(plan)[1])
        for shape in dict.fromkeys((_micro(plan.shape), plan.shape)):
            alike, others = _numbers(plan, shape)
            tries = [*((number, "none") for number in (*alike, *others)), *((number, None) for number in alike)]
            for requests in (each for each in REQUESTS if each < most or shape != plan.shape):
                for number, choices in tries:
                    small = dataclasses.replace(
                        plan, shape=shape, schedule=number, requests=requests, strategy=ANSWERS, choices=choices
                    )
                    if (outcome := self._fails(small)) is not None:
                        return outcome
        return None

    def _fewer_answers(self, best: Outcome) -> Outcome:
        """Leave out "no" after "no", halves first, until each one that is left is needed."""
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
    """The first finding of that code, of any code for None."""
    return next((each for each in _told(outcome) if code in (None, each.code)), None)


def _micro(shape: str) -> str:
    """The micro shape of the same model; the shape itself where there is none."""
    small = f"{shape.rpartition('-')[0]}-micro"
    return small if small in MICRO_SHAPES else shape


def _numbers(plan: Plan, shape: str) -> tuple[list[int], list[int]]:
    """Schedule numbers, each with a workload of its own: those with which another shape runs the plan's variant, and
    some with which it runs others."""
    count = scenario_of(plan).table.variants
    alike: list[int] = []
    others: list[int] = []
    for number in range(count * ALIKE):
        variant = dataclasses.replace(plan, shape=shape, schedule=number).variant
        (others if (variant - plan.variant) % count else alike).append(number)
    return alike[:ALIKE] or [plan.schedule], others[:OTHERS]
