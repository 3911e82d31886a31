"""priority: requests of high priority arrive while many of low priority run, in less memory than all need."""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import QuestionSource
from kvcheck.core.live.scenarios.pressure import pressing, subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
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


PRIORITY = ServerScenario(
    draw=draw,
    needs={"overtake": 1},
    why_not=lambda served: "this server takes no priorities" if served.has_priorities is False else None,
    unlikely=lambda served: None if served.has_priorities else "the server does not say that it takes priorities",
)
