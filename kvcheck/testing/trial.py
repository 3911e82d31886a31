"""Trial: results of the calls of one test, for a runner that chooses the seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence
from kvcheck.testing.failures import IntegrityError, Judged


@dataclass(slots=True)
class Trial:
    seed: int = 0
    judged: list[Judged] = field(default_factory=list)

    def evidence(self) -> Evidence:
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
    """Give calls of kvcheck.testing in this block this seed, and keep their results."""
    made = Trial(seed)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def seed_of(asked: int | None) -> int:
    current = _CURRENT.get()
    return asked if asked is not None else current.seed if current is not None else 0


def conclude(judged: Judged) -> Judged:
    """Add the result to the trial and return it. Raises IntegrityError if it has findings."""
    current = _CURRENT.get()
    if current is not None:
        current.judged.append(judged)
    if judged.findings:
        raise IntegrityError(judged)
    return judged
