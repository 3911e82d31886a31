"""Disturber: makes things happen to requests, prefixes, rooms and stored objects in the states where they seldom do.

Invariants:
- It aims at the situation that this schedule has reached least often; the number of the schedule says with which it
  begins. So two schedules of one cell aim at different ones, and a schedule depends on its plan alone.
- All that it does is a row of SITUATIONS, and each is counted when it has happened.
- One request in ABORTED_SHARE at most is aborted, so that most of them are judged to their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvcheck.core.base.situations import Situation, situations_of
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.targets.target import Engine, Standing
from kvcheck.core.workload.events import Aborted, Emit, Event, Happened

PACE = 3
"""Rounds between two disturbances, so that an engine settles in between now and then."""
ABORTED_SHARE = 4
CALM_EVERY = 3
"""One schedule of three is left alone: what only a long quiet run shows needs one, too."""
CAUSED = ("abort", "preempt", "evict", "pressure", "remove", "overwrite")
"""What it makes happen. Other rows happen by the workload."""
RELEASED = ("match", "split")
"""What it makes likely: a rival is sent, which shares what is in the state now."""
REPEATS = 4
"""So often at most a schedule aims at one situation, so that the engine does more than to recover."""
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
    return Disturber(
        situations_of(scenario), emit, start=variant, requests=len(load.jobs), spared=spared, rivals=load.rivals
    )


class Disturber:
    """Looks at an engine between two rounds, and makes one thing happen to one subject, or names a rival to send."""

    def __init__(
        self,
        legal: tuple[Situation, ...],
        emit: Emit,
        *,
        start: int,
        requests: int,
        spared: Callable[[int], bool] = lambda request: False,
        rivals: Iterable[Rival] = (),
    ) -> None:
        self._held = list(rivals)
        mine = [each for each in legal if each.happening in CAUSED or (self._held and each.happening in RELEASED)]
        turn = start * STEP % len(mine)
        self._wanted = mine[turn:] + mine[:turn]
        self._emit = emit
        self._spared = spared
        self._reached: Counter[Situation] = Counter()
        self._aborts_left = requests // ABORTED_SHARE
        self._round = 0

    @property
    def held(self) -> frozenset[int]:
        """The rivals that it has not sent."""
        return frozenset(each.job.request for each in self._held)

    def noting(self, emit: Emit) -> Emit:
        """An Emit that also counts, as reached, what happens by itself."""

        def note(event: Event) -> None:
            if isinstance(event, Happened):
                self._reached[Situation(event.subject, event.state, event.happening)] += 1
            emit(event)

        return note

    def __call__(self, engine: Engine) -> int | None:
        """Do at most one thing. Returns the rival to send now, if that is it."""
        self._round += 1
        if self._round % PACE:
            return None
        standings = engine.standings()
        by_state: dict[tuple[str, str], list[Standing]] = {}
        for standing in standings:
            if standing.subject != "request" or not (isinstance(standing.name, int) and self._spared(standing.name)):
                by_state.setdefault((standing.subject, standing.state), []).append(standing)
        open_ones = [each for each in self._wanted if self._reached[each] < REPEATS]
        for situation in sorted(open_ones, key=lambda each: self._reached[each]):
            found = by_state.get((situation.subject, situation.state), [])
            if situation.happening in RELEASED:
                if (sent := self._release(situation, found, by_state)) is not None:
                    return sent
                continue
            turn = self._round % max(1, len(found))
            if any(self._try(engine, situation, each) for each in (found[turn:] + found[:turn])[:TRIED]):
                return None
        return None

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

    def _release(
        self,
        situation: Situation,
        found: Sequence[Standing],
        by_state: Mapping[tuple[str, str], Sequence[Standing]],
    ) -> int | None:
        """A rival whose lookup now meets the situation. It is counted once the engine has looked it up."""
        if situation.subject == "object":
            fetching = {each.name for each in by_state.get(("request", "fetching"), ())}
            fits = [each for each in self._held if each.shared and each.of in fetching]
        else:
            ends = {each.name for (subject, _), rows in by_state.items() if subject == "prefix" for each in rows}
            fits = [
                each
                for each in self._held
                if any(_meets(each, str(standing.name), ends, situation.happening) for standing in found)
            ]
        if not fits:
            return None
        self._held.remove(fits[0])
        self._reached[situation] += 1
        return fits[0].job.request


def _meets(rival: Rival, name: str, ends: set[int | str], happening: str) -> bool:
    """A rival's lookup goes through the prefix of that name, or ends inside it. ends: the names of all prefixes."""
    if name not in rival.chain:
        return False
    stop = rival.chain.index(name) + 1
    if happening == "match":
        return stop <= rival.shared
    start = max((at for at in range(stop) if at == 0 or rival.chain[at - 1] in ends), default=0)
    return start < rival.shared < stop
