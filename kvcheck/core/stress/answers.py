"""Answers: schedules as the answers that the process gets when it asks whether work is done.

    answer "yes"   what the asked record is behind runs now, and nothing else
    answer "no"    nothing runs; the process goes on without it

In one process, what is read and written in which order follows from these answers: work that nobody asked for is
ordered by nothing else, and the ordering oracle judges it in any order. Two things it notices without a question, and
whether they have landed is an answer too. A message lands when its receivers get their next turn, or, if the answer is
"no", when each of them has had one more. A write to the store lands at once, or, if the answer is "no", when the
process asks for it, waits for it or has nothing else to do.

    choices=12.m345     question 12 and what operation 345 brings get "no", all others "yes"

Invariants:
- "yes" to everything is what the eager order answers. A schedule is named by what it answers with "no".
- A question has a number that counts all questions before it, so equal answers so far mean equal numbers.
- Only a question whose record is not reached can be answered with "no".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.backend.simulated import Choice, Goal, Pending
from kvcheck.core.cache.transfer.wire import LEGS
from kvcheck.core.run.exploring import parse_answers
from kvcheck.core.stress.strategies import Draw, EagerStrategy

MESSAGES = (":message", ":copies")
WRITES = tuple(f":async.{leg}" for leg in LEGS)
STORES = ("storage",)
"""Ends of the names of lanes whose operations the process notices without asking for them."""
QUIET = (*WRITES, *STORES)
UNASKED = (*MESSAGES, *QUIET)
SHARES = ((1, 8), (1, 4), (1, 2), (3, 4))
"""Shares of "no", of which chance picks one for a schedule: few bugs need many of them, and some do."""
EARLY_BITS = 4


class AnswersStrategy:
    """says_no: whether the question or landing of that name is answered with "no". wanted: those that have to be.

    asked: names of what could be answered with "no", in order. refused: those of them that were.
    """

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
        """The next chunk of what is asked for, or a pause."""
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
        """How the finished run was another one than its choices are from, or None."""
        left = [name for name in self._wanted if name not in self.refused]
        if not left:
            return None
        return f"of {len(self._wanted)} recorded answers: {len(left)} could not be given, the first is {left[0]}"

    def _answer(self, name: str) -> bool:
        """Whether it is "no"."""
        self.asked.append(name)
        is_no = self._says_no(name)
        if is_no:
            self.refused.append(name)
        return is_no

    def _landing(self, goal: Goal, *, is_turn: bool) -> Pending | None:
        """What has to run next for something to land now, the oldest first; None where all that may land has."""
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
    """The end of a lane "SENDER>RECEIVER:message"."""
    return message.lane.name.partition(">")[2].rpartition(":")[0]


def _first(enabled: Sequence[Choice], head: Pending | None) -> int | None:
    return None if head is None else next(at for at, (each, _) in enumerate(enabled) if each is head)


def answers(draw: Draw) -> AnswersStrategy:
    """Those that the choices name; without choices, chance. Raises UsageError for damaged choices."""
    if draw.choices is not None:
        refused = parse_answers(draw.choices)
        return AnswersStrategy(frozenset(refused).__contains__, refused)
    return AnswersStrategy(by_chance(Rng(draw.seed * 1_000_003 + draw.schedule)))


def by_chance(rng: Rng) -> Callable[[str], bool]:
    """Says "no" to a share of everything, and to one early question in any case.

    Without that one, three of five schedules of a short workload with a small share are the eager order once more: it
    asks few questions, and most of what may land changes nothing that the process does.
    """
    share = SHARES[rng.below(len(SHARES))]
    left = [rng.below(1 << rng.below(EARLY_BITS))]

    def says_no(name: str) -> bool:
        is_early = False
        if not name.startswith("m"):
            is_early = left[0] == 0
            left[0] -= 1
        return rng.chance(*share) or is_early

    return says_no
