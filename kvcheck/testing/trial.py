"""Trial: what the calls of one test have judged, for whoever runs the test with a seed.

Invariants:
- Without a trial a call has seed 0 and tells nobody but its caller.
- A trial belongs to one thread of execution; it is never shared between tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence
from kvcheck.testing.failures import IntegrityError, Judged


@dataclass(slots=True)
class Trial:
    """One run of a test. seed: what its calls draw from. judged: their results, in order."""

    seed: int = 0
    judged: list[Judged] = field(default_factory=list)

    def evidence(self) -> Evidence:
        """How much was judged, as a record counts it."""
        total = Evidence(schedules=1)
        for each in self.judged:
            orderings = each.orderings or None
            total = total.plus(
                Evidence(events=each.reads, words_verified=dict(each.words), orderings_checked=orderings)
            )
        return total


_CURRENT: ContextVar[Trial | None] = ContextVar("kvcheck trial", default=None)


@contextmanager
def trial(seed: int) -> Iterator[Trial]:
    """In here calls of kvcheck.testing draw from this seed, and what they judge is kept."""
    made = Trial(seed)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def seed_of(asked: int | None) -> int:
    """The seed of a call: the one that was asked for, or the trial's, or 0."""
    current = _CURRENT.get()
    return asked if asked is not None else current.seed if current is not None else 0


def conclude(judged: Judged) -> Judged:
    """Tell the trial, and return the result. Raises IntegrityError if there are findings."""
    current = _CURRENT.get()
    if current is not None:
        current.judged.append(judged)
    if judged.findings:
        raise IntegrityError(judged)
    return judged
