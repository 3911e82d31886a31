"""Disturber: makes things happen to requests, prefixes, rooms and stored objects in the states where they seldom do.

Invariants:
- It aims at the situation that this schedule has reached least often; the number of the schedule says with which it
  begins. So two schedules of one cell aim at different ones, and a schedule depends on its plan alone.
- All that it does is a row of SITUATIONS, and each is counted when it has happened.
- One request in ABORTED_SHARE at most is aborted, so that most of them are judged to their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcheck.core.base.situations import Situation, situations_of
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.targets.target import Engine, Standing
from kvcheck.core.workload.events import Aborted, Emit, Happened

PACE = 3
"""Rounds between two disturbances, so that an engine settles in between now and then."""
ABORTED_SHARE = 4
CALM_EVERY = 3
"""One schedule of three is left alone: what only a long quiet run shows needs one, too."""
CAUSED = ("abort", "preempt", "evict", "pressure", "remove", "overwrite")
"""What it makes happen. Other rows happen by the workload."""
REPEATS = 4
"""So often at most a schedule makes one situation happen, so that the engine does more than to recover."""
TRIED = 8
"""Of the subjects in one state, so many are tried in one round: some may not be touched."""
STEP = 7
"""By so many rows the first situation of a schedule lies behind that of the schedule before it."""


def disturber(
    scenario: str, load: Load, emit: Emit, variant: int, *, spared: Callable[[int], bool] = lambda request: False
) -> Disturber | None:
    """The disturber of a schedule; None for one that is left alone. spared: requests that nothing is done to."""
    if load.from_trace or variant % CALM_EVERY == 0:
        return None
    return Disturber(situations_of(scenario), emit, start=variant, requests=len(load.jobs), spared=spared)


class Disturber:
    """Looks at an engine between two rounds, and makes one thing happen to one subject."""

    def __init__(
        self,
        legal: tuple[Situation, ...],
        emit: Emit,
        *,
        start: int,
        requests: int,
        spared: Callable[[int], bool] = lambda request: False,
    ) -> None:
        mine = [each for each in legal if each.happening in CAUSED]
        turn = start * STEP % len(mine)
        self._wanted = mine[turn:] + mine[:turn]
        self._emit = emit
        self._spared = spared
        self._reached: Counter[Situation] = Counter()
        self._aborts_left = requests // ABORTED_SHARE
        self._round = 0

    def __call__(self, engine: Engine) -> None:
        """Do at most one thing."""
        self._round += 1
        if self._round % PACE:
            return
        by_state: dict[tuple[str, str], list[Standing]] = {}
        for standing in engine.standings():
            if standing.subject != "request" or not (isinstance(standing.name, int) and self._spared(standing.name)):
                by_state.setdefault((standing.subject, standing.state), []).append(standing)
        open_ones = [each for each in self._wanted if self._reached[each] < REPEATS]
        for situation in sorted(open_ones, key=lambda each: self._reached[each]):
            found = by_state.get((situation.subject, situation.state), [])
            turn = self._round % max(1, len(found))
            if any(self._try(engine, situation, each) for each in (found[turn:] + found[:turn])[:TRIED]):
                return

    def _try(self, engine: Engine, situation: Situation, standing: Standing) -> bool:
        is_abort = situation.happening == "abort"
        if (is_abort and not self._aborts_left) or not engine.make_happen(situation.happening, standing):
            return False
        self._reached[situation] += 1
        self._emit(Happened(situation.subject, situation.state, situation.happening))
        if is_abort and isinstance(standing.name, int):
            self._aborts_left -= 1
            self._emit(Aborted(standing.name))
        return True
