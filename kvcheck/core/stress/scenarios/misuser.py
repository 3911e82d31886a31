"""Misuser: makes illegal calls between the rounds of an engine, and ends the schedule if one is let through.

Invariants:
- Two schedules in a row make every call that has to be prepared, each half of them: the number says which half.
- It draws no number and lets no time pass, so the order of a schedule is the same with it and without.
- A call on the engine that is let through ends the schedule at once, since its state is broken. One on the scene does
  so at the end, and all that other oracles have to say comes first.
"""

from __future__ import annotations

from kvcheck.core.base.errors import CheckFailed
from kvcheck.core.stress.schedule import STRIDE
from kvcheck.core.targets.misuse import Misuses
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt
from kvcheck.core.workload.events import Emit, Misused

PACE = 4
"""Prepared calls of a round. What is left when the engine is closed is made then."""
TRIES = 3
"""Calls on the engine as it is that are looked at in a round, until one can be made."""


class Misuser:
    """The calls of one schedule. variant: of its plan."""

    def __init__(self, misuses: Misuses, emit: Emit, *, variant: int) -> None:
        self._emit = emit
        half = variant // STRIDE % 2
        self._once = misuses.once[half::2]
        self._always = misuses.always
        self._turn = variant
        self._wrong: list[str] = []

    def __call__(self) -> None:
        """The calls of one round. Raises CheckFailed for one on the engine that is not refused as it has to be."""
        self._made(self._prepared(PACE) + self._on_engine())

    def finish(self) -> None:
        """The prepared calls that are left. Raises CheckFailed if one of all was not refused as it has to be."""
        self._made(self._prepared(len(self._once)))
        if self._wrong:
            more = f"; {len(self._wrong) - 1} more calls are wrong" if len(self._wrong) > 1 else ""
            raise CheckFailed(self._wrong[0] + more)

    def _prepared(self, count: int) -> int:
        """Make so many calls on the scene; how many could be made and are right."""
        now, self._once = self._once[:count], self._once[count:]
        told = [each.make() for each in now]
        self._wrong += [each for each in told if isinstance(each, str)]
        return told.count(None)

    def _on_engine(self) -> int:
        for _ in range(TRIES if self._always else 0):
            self._turn += 1
            if _made_now(self._always[self._turn % len(self._always)]):
                return 1
        return 0

    def _made(self, count: int) -> None:
        if count:
            self._emit(Misused(count))


def _made_now(attempt: Attempt) -> bool:
    """Whether the call could be made."""
    found = attempt.make()
    if isinstance(found, str):
        raise CheckFailed(found)
    return found is not NOT_NOW
