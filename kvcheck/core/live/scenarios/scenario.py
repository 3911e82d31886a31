"""Scenario of a running server: rounds of requests that lead into one situation, and the evidence for it.

Invariants:
- A round depends on its draw alone: seed, sizes and the server's facts. No clock, no answer.
- A round holds all requests that its situation needs, so it can be sent alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import AbortRequest, Question, Served
from kvcheck.core.live.questions import QuestionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """retries: it is sent again after its abort, and answered to the end."""

    question: Question
    priority: int | None = None
    abort: AbortRequest | None = None
    retries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests sent together. retractions: on demand, if allowed."""

    orders: tuple[Order, ...]
    concurrency: int
    retractions: int = 0


def wave_of(questions: Sequence[Question], sizes: Sizes) -> Wave:
    return Wave(orders=tuple(Order(question=question) for question in questions), concurrency=sizes.concurrency)


@dataclass(frozen=True, slots=True)
class Round:
    """Waves, one after the other: each begins when the one before is answered."""

    waves: tuple[Wave, ...]

    @property
    def orders(self) -> tuple[Order, ...]:
        return tuple(order for wave in self.waves for order in wave.orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """requests: approximate. longest: tokens of a request and its answer. pool: of the device tier."""

    requests: int
    concurrency: int
    longest: int
    pool: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerScenario:
    """Fields of a scenario. needs: kind of evidence -> least count of a whole run for a pass. any_of: kinds of which
    one suffices beside them. why_not: why this server cannot get into the situation. unlikely: why a run that names
    no scenario leaves this one out."""

    draw: Callable[[QuestionSource, Rng, Sizes], Round]
    needs: Mapping[str, int] = field(default_factory=dict)
    any_of: tuple[str, ...] = ()
    why_not: Callable[[Served], str | None] = lambda served: None
    unlikely: Callable[[Served], str | None] = lambda served: None
