"""retract-resume: more long answers at a time than the pool holds, and retractions on demand if allowed."""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import QuestionSource, Subject
from kvcheck.core.live.scenarios.pressure import pressing, subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave

FORCED = 4


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
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


RETRACT_RESUME = ServerScenario(draw=draw, needs={"retract": 1})
