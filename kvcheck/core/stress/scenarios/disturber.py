"""Disturber: makes things happen to requests, prefixes, rooms and stored objects in states in which they are rare.

Invariants:
- It aims at the situation that this schedule has reached least often, beginning at one chosen by the schedule's number.
- Aborts, repeats of a situation and jumps of the clock are bounded, so that most requests are judged to their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from zlib import crc32

from kvcheck.core.base.situations import Situation, situations_of
from kvcheck.core.cache.events import Emit, Event
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.scenario import ACTS, Load
from kvcheck.core.stress.targets.target import Engine, Standing
from kvcheck.core.stress.workload.events import Aborted, Happened

PACE = 3
"""Rounds between two disturbances, so that an engine settles in between."""
PASSING = frozenset(
    {
        *("fetching", "loading", "ready", "restoring", "handing over", "transferring"),
        *("being backed up", "being loaded", "being stored", "being written", "being read"),
    }
)
"""States that soon end. A happening still missing in one of them is made in any round."""
ABORTED_SHARE = 4
CALM_EVERY = 5
"""One schedule of five is left alone, for bugs of long quiet runs. Scenarios change their settings with other periods,
so none of their values is always left alone."""
ABORTS_EACH = 2
"""Most aborts in one state, so that some are left for states that come late."""
CAUSED = ("abort", "preempt", "time out", "copy", "evict", "pressure", "remove", "overwrite")
"""Happenings that it makes. Others come from the workload."""
RELEASED = ("match", "split")
"""Happenings that it makes likely, by a rival that shares the subject's prefix."""
MOST = 4
"""Most times that a schedule aims at one situation, so that the engine does more than recover."""
TRIED = 8
"""Of the subjects in one state, so many are tried in one round: some may not be touched."""
RARE = frozenset(
    {"prefilling", "handing over", "sealing", "transferring", "ready", "restoring", "draining"}
    | {"partly reported", "arrived"}
)
"""Rare states. Half of the rare happenings of a schedule are kept for them, and for a few situations that it aims at.
Other schedules take the other half."""
BRIEF = RARE | {"asked for", "joined"}
"""States of a few rounds: they are aimed at in any round."""
OF_REQUESTS = ("request", "room")
STEP = 7919
"""Distance, in rows, between the first situations of consecutive schedules. It is a prime above the number of rows, so
that every row is the first one in turn."""


def disturber(
    scenario: str,
    load: Load,
    emit: Emit,
    variant: int,
    *,
    shape: str = "",
    spared: Callable[[int], bool] = lambda request: False,
    focus: Collection[str] = (),
) -> Disturber | None:
    """None for a schedule that is left alone. shape: of the cell, so that cells begin with different situations.
    spared: requests to leave alone. focus: keys of situations that every schedule aims at."""
    if load.from_trace or variant % CALM_EVERY == 0 or ACTS not in load.faults:
        return None
    start = variant + crc32(f"{scenario} {shape}".encode()) + sum(job.total_tokens for job in load.jobs)
    return Disturber(
        situations_of(scenario),
        emit,
        start=start,
        requests=len(load.jobs),
        spared=spared,
        rivals=load.rivals,
        focus=focus,
    )


class Disturber:
    def __init__(
        self,
        legal: tuple[Situation, ...],
        emit: Emit,
        *,
        start: int,
        requests: int,
        spared: Callable[[int], bool] = lambda request: False,
        rivals: Iterable[Rival] = (),
        focus: Collection[str] = (),
    ) -> None:
        self._held = list(rivals)
        focused = sum(each.happening == "abort" for each in legal if each.key in focus)
        # If schedules aim at several aborts, one more is left for another state, in turn.
        self._left = {"abort": max(requests // ABORTED_SHARE, focused + 1 if focused > 1 else 0), "time out": 1}
        self._each = {"abort": ABORTS_EACH if self._held else 1, "time out": 1}
        mine = [each for each in legal if each.happening in CAUSED or (self._held and each.happening in RELEASED)]
        turn = start * STEP % len(mine)
        mine = sorted(mine[turn:] + mine[:turn], key=lambda each: each.key not in focus)
        self._kept = Counter(each.happening for each in mine if each.key in focus)
        self._wanted = [each for each in mine if each.happening not in self._left]
        for what, most in self._left.items():
            kind = [each for each in mine if each.happening == what]
            self._wanted += kind[:most]
            self._wanted += [each for each in kind[most : len(kind) // 2] if each.state in RARE]
        self._wanted.sort(key=mine.index)
        self._focus = focus
        self._emit = emit
        self._spared = spared
        self._reached: Counter[Situation] = Counter()
        self._round = 0

    @property
    def held(self) -> frozenset[int]:
        return frozenset(each.job.request for each in self._held)

    def noting(self, emit: Emit) -> Emit:
        def note(event: Event) -> None:
            if isinstance(event, Happened):
                self._reached[Situation(event.subject, event.state, event.happening)] += 1
            emit(event)

        return note

    def __call__(self, engine: Engine) -> int | None:
        """Do at most one thing. Return the rival to send now."""
        self._round += 1
        wanted = self._open()
        by_state = self._met(engine) if wanted else {}
        for situation in wanted:
            found = by_state.get((situation.subject, situation.state), [])
            if situation.happening in RELEASED:
                if (sent := self._release(situation, found, by_state)) is not None:
                    return sent
                continue
            turn = self._round % max(1, len(found))
            if any(self._try(engine, situation, each) for each in (found[turn:] + found[:turn])[:TRIED]):
                return None
        return None

    def _open(self) -> list[Situation]:
        is_due = self._round % PACE == 0
        found = [
            each
            for each in self._wanted
            if (is_due or each.state in BRIEF or (each.state in PASSING and not self._reached[each]))
            and self._reached[each] < self._most(each)
        ]
        return sorted(found, key=lambda each: self._reached[each])

    def _most(self, situation: Situation) -> int:
        """Rivals are few, so most are kept for passing states."""
        if situation.happening in RELEASED and situation.state not in PASSING:
            return 1
        return self._each.get(situation.happening, MOST)

    def _met(self, engine: Engine) -> dict[tuple[str, str], list[Standing]]:
        by_state: dict[tuple[str, str], list[Standing]] = {}
        for standing in engine.standings():
            is_request = standing.subject in OF_REQUESTS and isinstance(standing.name, int)
            if not (is_request and self._spared(int(standing.name))):
                by_state.setdefault((standing.subject, standing.state), []).append(standing)
        return by_state

    def _try(self, engine: Engine, situation: Situation, standing: Standing) -> bool:
        what = situation.happening
        kept = 0 if situation.key in self._focus else self._kept[what]
        if what in self._left and self._left[what] <= kept:
            return False
        if not engine.make_happen(what, standing):
            return False
        self._reached[situation] += 1
        self._emit(Happened(situation.subject, situation.state, what))
        if what in self._left:
            self._left[what] -= 1
            self._kept[what] -= situation.key in self._focus
        if what == "abort" and isinstance(standing.name, int):
            self._emit(Aborted(standing.name))
        return True

    def _release(
        self,
        situation: Situation,
        found: Sequence[Standing],
        by_state: Mapping[tuple[str, str], Sequence[Standing]],
    ) -> int | None:
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
    """Whether a rival's lookup goes through the named prefix, or ends inside it."""
    if name not in rival.chain:
        return False
    stop = rival.chain.index(name) + 1
    if happening == "match":
        return stop <= rival.shared
    start = max((at for at in range(stop) if at == 0 or rival.chain[at - 1] in ends), default=0)
    return start < rival.shared < stop
