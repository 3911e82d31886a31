"""aborts: requests end at drawn moments, by call and by closed connections, beside others that go on.

Invariants:
- An abort comes in the first quarter of an answer, so that most of it could still wrongly be sent.
- Each aborted request is sent again, so that its leftovers are read.
"""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import AbortRequest
from kvcheck.core.live.questions import QuestionSource
from kvcheck.core.live.scenarios.pressure import pressing, subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave

LEAST_ANSWER = 96
"""Tokens of an answer with an abort: enough for an engine to be in its middle."""


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    lengths = pressing(sizes)
    orders = []
    for number in range(sizes.requests):
        mine = lengths.draw(rng)
        question = questions.put(rng, subject(questions, rng, mine.prompt), max(mine.answer, LEAST_ANSWER))
        after = rng.below(max(1, len(question.expected) // 4))
        abort = AbortRequest(after=after, by_call=number % 4 == 2) if number % 2 == 0 else None
        orders.append(Order(question=question, abort=abort, retries=abort is not None))
    return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency),))


ABORTS = ServerScenario(draw=draw, needs={"abort": 1})
