"""Answers: schedules as the results of the process's completion polls.

    answer "yes"   the work behind the polled record runs now, and nothing else
    answer "no"    nothing runs; the process goes on without it

In one process these answers determine the order of its reads and writes; other work is unordered, and judged by the
ordering oracle in any order. Two events need no poll: a message lands at its receivers' next turn, or, with "no", one
turn later; a write to the store at once, or, with "no", when the process polls or waits for it or is idle.

    choices=12.m345     question 12 and the message or write of operation 345 get "no", all others "yes"

Invariants:
- A question's number counts all questions before it, so equal answers so far mean equal numbers.
- Only a question whose record is not reached can be answered with "no".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.backend.simulated import Choice, Goal, Pending
from kvcheck.core.cache.transfer.wire import LEGS
from kvcheck.core.run.turns import parse_answers
from kvcheck.core.stress.strategies import Draw, EagerStrategy

MESSAGES = (":message", ":copies")
WRITES = tuple(f":async.{leg}" for leg in LEGS)
STORES = ("storage",)
"""Ends of names of lanes whose operations the process notices without a poll."""
QUIET = (*WRITES, *STORES)
UNASKED = (*MESSAGES, *QUIET)
SHARES = ((1, 8), (1, 4), (1, 2), (3, 4))
"""Shares of "no", of which chance picks one for a schedule: few bugs need many of them."""
EARLY_BITS = 4


class AnswersStrategy:
    """says_no: whether the named question or landing gets "no". wanted: those that must."""

    def __init__(self, says_no: Callable[[str], bool], wanted: Collection[str] = ()) -> None:
        self._says_no = says_no
        self._wanted = wanted
        self._eager = EagerStrategy()
        self._goal: Goal | None = None
        self._is_no = False
        self._lands: dict[int, int | None] = {}
        self._turn = 0
        self._receivers: set[str] = set()
        self.asked: list[str] = []
        self.refused: list[str] = []

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        if goal is None:
            return None if may_pause else self._eager.choose(enabled, may_pause=False)
        is_new, self._goal = goal is not self._goal, goal
        is_turn = goal.record is None and goal.query is not None
        self._turn += is_new and is_turn
        if (landing := self._landing(goal, is_turn=is_turn)) is not None:
            return _first(enabled, landing)
        if goal.record is None or not may_pause:
            return _first(enabled, goal.next())
        if is_new:
            self._is_no = goal.next() is not None and self._answer(str(goal.query))
        return None if self._is_no else _first(enabled, goal.next())

    def divergence(self) -> str | None:
        left = [name for name in self._wanted if name not in self.refused]
        if not left:
            return None
        return f"of {len(self._wanted)} recorded answers: {len(left)} could not be given, the first is {left[0]}"

    def _answer(self, name: str) -> bool:
        self.asked.append(name)
        is_no = self._says_no(name)
        if is_no:
            self.refused.append(name)
        return is_no

    def _landing(self, goal: Goal, *, is_turn: bool) -> Pending | None:
        for first in sorted(goal.firsts(UNASKED if is_turn else QUIET), key=lambda each: each.ordinal):
            head = goal.next(first.record)
            if head is not None and self._may_land(first):
                return head
        return None

    def _may_land(self, first: Pending) -> bool:
        if first.ordinal not in self._lands:
            self._receivers.add(_receiver(first))
            is_no = self._answer(f"m{first.ordinal}")
            later = None if first.lane.name.endswith(STORES) else self._turn + len(self._receivers)
            self._lands[first.ordinal] = later if is_no else self._turn
        lands = self._lands[first.ordinal]
        return lands is not None and self._turn >= lands


def _receiver(message: Pending) -> str:
    return message.lane.name.partition(">")[2].rpartition(":")[0]


def _first(enabled: Sequence[Choice], head: Pending | None) -> int | None:
    return None if head is None else next(at for at, (each, _) in enumerate(enabled) if each is head)


def answers(draw: Draw) -> AnswersStrategy:
    """Strategy of the recorded choices, or by chance. Raises UsageError for damaged choices."""
    if draw.choices is not None:
        refused = parse_answers(draw.choices)
        return AnswersStrategy(frozenset(refused).__contains__, refused)
    return AnswersStrategy(by_chance(Rng(draw.seed * 1_000_003 + draw.schedule)))


def by_chance(rng: Rng) -> Callable[[str], bool]:
    """Answer "no" to a random share, and to one early question, without which three of five short schedules with a
    small share repeat the eager order."""
    share = SHARES[rng.below(len(SHARES))]
    left = [rng.below(1 << rng.below(EARLY_BITS))]

    def says_no(name: str) -> bool:
        is_early = False
        if not name.startswith("m"):
            is_early = left[0] == 0
            left[0] -= 1
        return rng.chance(*share) or is_early

    return says_no
