"""pd-transfer: prompts of many lengths are computed by a prefill server and answered by a decode server.

Invariants:
- Lengths also lie around page edges: the last page of a transfer is full, nearly full or nearly empty.
"""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import QuestionSource, Subject
from kvcheck.core.live.scenarios.pressure import subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave

LONGEST_PROMPT = 600
EDGE = 16


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    """One wave; half of the requests begin as an earlier one does, so prefill hits its own prefix cache."""
    most = min(sizes.longest * 3 // 4, LONGEST_PROMPT)
    drawn: list[Subject] = []
    orders = []
    for _ in range(sizes.requests):
        length = EDGE * (2 + rng.below(most // EDGE - 2)) + rng.below(5) - 2
        whole = drawn[rng.below(len(drawn))] if drawn and rng.chance(1, 2) else None
        prefix = None if whole is None else whole.cut(min(len(whole.values) // 2, length // 2))
        drawn.append(subject(questions, rng, length, prefix=prefix))
        orders.append(Order(question=questions.put(rng, drawn[-1], questions.cover(drawn[-1]))))
    return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency),))


PD_TRANSFER = ServerScenario(
    draw=draw,
    needs={"transfer": 1},
    unlikely=lambda served: None if served.mode == "pair" else "no pair of a prefill and a decode server was named",
)
