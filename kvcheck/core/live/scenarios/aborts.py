"""aborts: requests end at drawn moments, by call and by closed connections, beside others that go on.

Invariants:
- An abort comes in the first quarter of an answer, so that most of it is left to be wrongly given.
- Each aborted request is sent again, so that what it left behind is read.
- What arrived before an abort is judged like any answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Abort, Served
from kvcheck.core.live.questions import Questions
from kvcheck.core.live.scenarios.pressure import pressing, subject
from kvcheck.core.live.scenarios.scenario import Order, Round, Sizes, Wave

LEAST_ANSWER = 96
"""Tokens of an answer that is aborted: enough for an engine to be in its middle."""


@dataclass(frozen=True, slots=True)
class Aborts:
    """See the module."""

    needs: Mapping[str, int] = field(default_factory=lambda: {"abort": 1})
    any_of: tuple[str, ...] = ()

    def why_not(self, served: Served) -> str | None:
        """Any server may: a connection can always be closed."""
        return None

    def unlikely(self, served: Served) -> str | None:
        """Never left out."""
        return None

    def draw(self, questions: Questions, rng: Rng, sizes: Sizes) -> Round:
        """One wave; half of its requests are aborted, by turns by call and by closed connection."""
        lengths = pressing(sizes)
        orders = []
        for number in range(sizes.requests):
            mine = lengths.draw(rng)
            question = questions.put(rng, subject(questions, rng, mine.prompt), max(mine.answer, LEAST_ANSWER))
            after = rng.below(max(1, len(question.expected) // 4))
            abort = Abort(after=after, by_call=number % 4 == 2) if number % 2 == 0 else None
            orders.append(Order(question=question, abort=abort, retries=abort is not None))
        return Round((Wave(orders=tuple(orders), concurrency=sizes.concurrency),))


ABORTS = Aborts()
