"""Scenario of a running server: rounds of requests that lead into one situation, and what shows that it was reached.

Invariants:
- A round is decided by its draw alone: seed, sizes and what the server says of itself. No clock, no answer.
- A round holds all requests that its situation needs, so a round can be sent again alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Abort, Question, Served
from kvcheck.core.live.questions import QuestionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request of a round.

    priority: larger is served first. abort: that it is aborted. retries: it is sent once more after its abort, and
    answered to the end then.
    """

    question: Question
    priority: int | None = None
    abort: Abort | None = None
    retries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests that are sent together. concurrency: at most so many at a time. retractions: how often the engine is
    made to retract all that runs, where that is allowed."""

    orders: tuple[Order, ...]
    concurrency: int
    retractions: int = 0


def wave_of(questions: Sequence[Question], sizes: Sizes) -> Wave:
    """A wave that only asks."""
    return Wave(orders=tuple(Order(question=question) for question in questions), concurrency=sizes.concurrency)


@dataclass(frozen=True, slots=True)
class Round:
    """Waves, one after the other: each begins when the one before is answered."""

    waves: tuple[Wave, ...]

    @property
    def orders(self) -> tuple[Order, ...]:
        """All requests, in the order in which they are handed out."""
        return tuple(order for wave in self.waves for order in wave.orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a round asks. requests: about so many. concurrency: at a time. longest: tokens of a request and its
    answer. pool: tokens of the server's device tier; None where it does not say."""

    requests: int
    concurrency: int
    longest: int
    pool: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One situation.

    draw: one round. needs: kind of evidence -> least count of a whole run for a pass. any_of: kinds one of which is
    enough beside them. why_not: why this server cannot get into the situation; None where it may. unlikely: why a run
    that names no scenario leaves this one out; None where it does not.
    """

    draw: Callable[[QuestionSource, Rng, Sizes], Round]
    needs: Mapping[str, int] = field(default_factory=dict)
    any_of: tuple[str, ...] = ()
    why_not: Callable[[Served], str | None] = lambda served: None
    unlikely: Callable[[Served], str | None] = lambda served: None
