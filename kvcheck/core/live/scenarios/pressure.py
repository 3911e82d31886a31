"""aborts, priority, retract-resume: requests that together need more than a server's pool.

Invariants:
- An abort comes in the first quarter of an answer, so that most of it could still wrongly be sent.
- Each aborted request is sent again, so that its leftovers are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import AbortRequest
from kvcheck.core.live.questions import WALK_FRAME, QuestionSource, Subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave

USUAL = 280
MOST = 2048
"""Most tokens of a request and its answer: longer ones take time and reach nothing else."""
OVER_PERCENT = 140
"""Part of the pool that concurrent requests need at their end."""
LEAST_ANSWER = 96
"""Tokens of an answer with an abort: enough for an engine to be in its middle."""
FORCED = 4
"""Retractions on demand, if they are allowed."""


def aborts(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    lengths = pressing(sizes)
    orders = []
    for number in range(sizes.requests):
        mine = lengths.draw(rng)
        question = questions.put(rng, subject(questions, rng, mine.prompt), max(mine.answer, LEAST_ANSWER))
        after = rng.below(max(1, len(question.expected) // 4))
        abort = AbortRequest(after=after, by_call=number % 4 == 2) if number % 2 == 0 else None
        orders.append(Order(question=question, abort=abort, retries=abort is not None))
    return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency),))


def priority(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    """One wave: two of three requests are long and of priority 0, the others short and of priority 5."""
    lengths = pressing(sizes)
    orders = []
    for number in range(sizes.requests):
        mine = lengths.draw(rng)
        is_high = number >= sizes.requests // 3 and number % 2 == 1
        answer = max(8, mine.answer // 4) if is_high else mine.answer
        question = questions.put(rng, subject(questions, rng, mine.prompt), answer)
        orders.append(Order(question=question, priority=5 if is_high else 0))
    return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency * 2),))


def retract_resume(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    """One wave. One request in three begins as an earlier one does, so hits and retractions meet."""
    lengths = pressing(sizes)
    drawn: list[Subject] = []
    orders = []
    for _ in range(sizes.requests):
        mine = lengths.draw(rng)
        prefix = None
        if drawn and rng.chance(1, 3):
            whole = drawn[rng.below(len(drawn))]
            prefix = whole.cut(min(len(whole.values) // 2, mine.prompt // 2))
        drawn.append(subject(questions, rng, mine.prompt, prefix=prefix))
        orders.append(Order(question=questions.put(rng, drawn[-1], mine.answer)))
    return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency, retractions=FORCED),))


ABORTS = ServerScenario(draw=aborts, needs={"abort": 1})
PRIORITY = ServerScenario(
    draw=priority,
    needs={"overtake": 1},
    why_not=lambda served: "this server takes no priorities" if served.has_priorities is False else None,
    unlikely=lambda served: None if served.has_priorities else "the server does not say that it takes priorities",
)
RETRACT_RESUME = ServerScenario(draw=retract_resume, needs={"retract": 1})


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    answer: int

    def draw(self, rng: Rng) -> Lengths:
        return Lengths(*(size * 3 // 4 + rng.below(size // 2 + 1) for size in (self.prompt, self.answer)))


def pressing(sizes: Sizes) -> Lengths:
    """Half prompt, half answer, since decode runs out of memory."""
    wanted = USUAL if sizes.pool is None else sizes.pool * OVER_PERCENT // 100 // sizes.concurrency
    # A drawn request is up to five quarters as long.
    total = min(max(wanted, USUAL), MOST, sizes.longest * 4 // 5)
    return Lengths(prompt=total // 2, answer=total - total // 2)


def subject(questions: QuestionSource, rng: Rng, length: int, *, prefix: Subject | None = None) -> Subject:
    """Draw a position test in one of four cases, if it fits, else a walk."""
    if prefix is not None:
        return questions.walk(rng, length, prefix=prefix) if prefix.is_walk else questions.marks(rng, prefix=prefix)
    if questions.has_marks and rng.chance(1, 4):
        return questions.marks(rng)
    return questions.walk(rng, length - WALK_FRAME)
