"""Wait search: looks for one wait that removes a failure in every schedule close to a small one.

The schedules are the small one, those with one "no" more or less, and if these are few, other workloads with equal
bounds. They first run as they are, then with one wait added, each candidate in turn.

Candidates come from pairs of operations: those of the ordering oracle, and if a status came before its data (KV203), a
pending copy and operations since. For each pair the waits of `Wait.stronger` are tried, all pairs with one strength
before the next.

Invariants:
- A wait is named if it was made, and with it no explored schedule had the failure, nor a new hang or error.
- It is a suggestion with its evidence, for the schedules that ran.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Backend, Completed, Submitted
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.turns import answers_text, parse_answers
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.shrinking import Likeness, likeness
from kvcheck.core.stress.waits import Wait, WaitingBackend, kind_of

MOST_EXPLORED = 40
"""Schedules that are explored with each wait, and without."""
MOST_PAIRS = 4
"""Pairs of operations from which candidates are made: those that most schedules have."""
STATUS_BEFORE_DATA = "KV203"
HANGS = "liveness"
"""The oracle of hangs, and of errors that the code under test raises."""

_Failure = tuple[Likeness, str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """failed, explored: schedules without a wait. cleared: schedules that ran with it, of which none failed."""

    wait: Wait | None
    tried: int
    failed: int
    explored: int
    cleared: int = 0

    def text(self) -> str:
        if self.wait is not None:
            return (
                f"{self.wait.text()}: with it, 0 of {counted(self.cleared, 'schedule')} failed; "
                f"without it, {self.failed} of {self.explored}"
            )
        if not self.tried:
            return "none missing"
        return f"none found: {self.tried} tried"


def search_waits(runner: ScheduleRunner, plan: Plan, finding: Finding, *, most: int = MOST_EXPLORED) -> Waits:
    """plan: the small schedule, of strategy answers, that makes the finding."""
    wanted = _failure(finding)
    landings: list[_Landing] = []

    def watched(each: Plan) -> Outcome:
        if finding.code != STATUS_BEFORE_DATA:
            return runner.run(each)
        landings.append(_Landing(finding))
        return runner.run(each, handlers=landings[-1].handlers())

    outcomes = list(_explored(watched, plan, most))
    failing = [each for each in outcomes if wanted in _failures(each)]
    known = {kind for each in outcomes for kind in _failures(each)}

    def is_clear(outcome: Outcome) -> bool:
        new = {kind for kind in _failures(outcome) - known if kind[0][0] == HANGS}
        return outcome.unjudged is None and not new and wanted not in _failures(outcome)

    pairs = [pair for each in landings for pair in each.pairs]
    pairs += [pair for each in failing for pair in dict.fromkeys(_pairs(each.findings))]
    fitting = [pair for pair in pairs if wanted[1] in (None, pair.earlier)]
    likely = [pair for pair, _ in Counter(fitting).most_common(MOST_PAIRS)]
    candidates = [wait for group in zip(*(each.stronger() for each in likely), strict=True) for wait in group]
    tried = 0
    for wait in dict.fromkeys(candidates):
        tried += 1
        if cleared := _cleared(runner, plan, wait, is_clear, most):
            return Waits(wait=wait, tried=tried, failed=len(failing), explored=len(outcomes), cleared=cleared)
    return Waits(wait=None, tried=tried, failed=len(failing), explored=len(outcomes))


def _cleared(runner: ScheduleRunner, plan: Plan, wait: Wait, is_clear: Callable[[Outcome], bool], most: int) -> int:
    """Schedules that ran with the wait; 0 if one was not clear, or if none made it."""
    made: list[WaitingBackend] = []

    def around(inner: Backend) -> Backend:
        made.append(WaitingBackend(inner, wait))
        return made[-1]

    ran = 0
    for outcome in _explored(lambda each: runner.run(each, around=around), plan, most):
        if not is_clear(outcome):
            return 0
        ran += 1
    return ran if any(each.made for each in made) else 0


def _explored(run: Callable[[Plan], Outcome], plan: Plan, most: int) -> Iterator[Outcome]:
    first = run(plan)
    yield first
    refused = parse_answers(plan.choices or "none")
    behind = first.asked.index(refused[-1]) + 1 if refused and refused[-1] in first.asked else 0
    fewer = [tuple(each for each in refused if each != left) for left in refused]
    more = [(*refused, name) for name in first.asked[behind:]]
    near = [dataclasses.replace(plan, choices=answers_text(answers)) for answers in (*fewer, *more)]
    others = (dataclasses.replace(plan, schedule=number) for number in range(most) if number != plan.schedule)
    for each in islice(chain(near, others), most - 1):
        yield run(each)


def _failures(outcome: Outcome) -> set[_Failure]:
    return {_failure(each) for each in outcome.findings if each.condition is None}


def _failure(finding: Finding) -> _Failure:
    earlier = (finding.minimal or {}).get("earlier") if finding.oracle == "ordering" else None
    return likeness(finding), earlier["operation"] if isinstance(earlier, dict) else None


def _pairs(findings: Iterable[Finding]) -> Iterator[Wait]:
    for finding in findings:
        earlier, later = ((finding.minimal or {}).get(which) for which in ("earlier", "later"))
        if finding.oracle == "ordering" and isinstance(earlier, dict) and isinstance(later, dict):
            yield _weakest(earlier["operation"], earlier["lane"], later["operation"], later["lane"])


def _weakest(earlier: str, earlier_lane: str, later: str, later_lane: str) -> Wait:
    return Wait(earlier=earlier, earlier_lane=kind_of(earlier_lane), later=later, later_lane=kind_of(later_lane))


class _Landing:
    """pairs: each pending copy for the request, with each operation for it queued since, the last ones first."""

    def __init__(self, finding: Finding) -> None:
        self.pairs: list[Wait] = []
        self._failure = _failure(finding)
        self._oracle = ORACLES.load(finding.oracle)()
        self._queued: list[Submitted] = []
        self._pending: dict[int, Submitted] = {}

    def handlers(self) -> list[tuple[type, Handler]]:
        judging = [(kind, partial(self._judge, handler)) for kind, handler in self._oracle.handlers()]
        return [(Submitted, self._submitted), (Completed, self._completed), *judging]

    def _submitted(self, event: Submitted) -> None:
        self._queued.append(event)
        self._pending[event.ordinal] = event

    def _completed(self, event: Completed) -> None:
        self._pending.pop(event.ordinal, None)

    def _judge(self, handler: Handler, event: object) -> None:
        known = len(self._oracle.findings)
        handler(event)
        for finding in self._oracle.findings[known:]:
            if _failure(finding) == self._failure:
                self.pairs += [pair for pair in self._now(finding) if pair not in self.pairs]

    def _now(self, finding: Finding) -> Iterator[Wait]:
        mine = [each for each in self._pending.values() if each.request == finding.request and each.writes]
        for later in reversed(self._queued):
            if later.ordinal in self._pending or later.request not in (None, finding.request):
                continue
            for earlier in reversed(mine):
                if earlier.ordinal < later.ordinal and kind_of(earlier.lane) != kind_of(later.lane):
                    yield _weakest(earlier.name, earlier.lane, later.name, later.lane)
