"""Misuser: makes illegal calls between the rounds of an engine, and ends the schedule if one is let through.

Invariants:
- Two schedules in a row make every call that has to be prepared, each half of them: the variant says which half.
- It draws no number and lets no time pass, so the order of a schedule is the same with it and without.
- A call on the engine that is let through ends the schedule at once, since its state is broken. One on the scene does
  so at the end, and all that other oracles have to say comes first.
"""

from __future__ import annotations

from kvcheck.core.base.errors import CheckFailed
from kvcheck.core.stress.schedule import STRIDE
from kvcheck.core.targets.misuse import Misuses
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt
from kvcheck.core.targets.target import Misusable
from kvcheck.core.workload.events import Emit, Misused

PACE = 4
"""Prepared calls of a round. What is left when the engine is closed is made then."""
ENGINE_PACE = 3
"""Rounds between two calls on the engine as it is."""
TRIES = 3
"""Calls on the engine as it is that are looked at in a round, until one can be made."""


def misuser_of(engine: Misusable, emit: Emit, variant: int) -> Misuser:
    """The misuser of a schedule. variant: of its plan."""
    return Misuser(engine.misuses(variant // STRIDE % 2), emit, turn=variant)


class Misuser:
    """The calls of one schedule. turn: with which of those on the engine it begins."""

    def __init__(self, misuses: Misuses, emit: Emit, *, turn: int) -> None:
        self._emit = emit
        self._once = misuses.once
        self._always = misuses.always
        self._turn = turn
        self._wrong: list[str] = []
        self._round = 0

    def __call__(self) -> None:
        """The calls of one round. Raises CheckFailed for one on the engine that is not refused as it has to be."""
        self._round += 1
        is_due = self._round % ENGINE_PACE == 0
        self._made(self._prepared(PACE) + (self._on_engine() if is_due else 0))

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
