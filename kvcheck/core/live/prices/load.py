"""Load: the requests of one pass, drawn from a seed. The last wave is timed; the waves before it fill the cache.

    shared       a prompt of each group; then requests whose first three quarters are a group's
    fresh        the same waves, lengths and answers; no two requests share a beginning
    returning    as shared; between the two, requests that need more than the device's pool

Invariants:
- Equal loads and rounds draw the same lengths, in the same order, for every kind and for all names.
- Other names give the same situation in other tokens, so no pass hits another one's cached pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question
from kvcheck.core.live.questions import SHORTEST, WALK_FRAME, Questions, Subject
from kvcheck.core.live.scenarios.scenario import Order, Round, Wave
from kvcheck.core.model.parameters import Parameters

SHARED, FRESH, RETURNING = "shared", "fresh", "returning"
LOADS = (SHARED, FRESH, RETURNING)
GROUP = 4
"""Requests that share one beginning."""
TESTS = 8
"""One request in TESTS is a position test."""
WARM_ANSWER = 8
FLOOD_PERCENT = 130
MOST_FLOOD = 2000
"""Most requests of a flood: more would take longer than the measured wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """prompt, answer: tokens of a timed request. pool: tokens of the larger server's device tier, for `returning`."""

    kind: str
    requests: int
    concurrency: int
    prompt: int
    answer: int
    seed: int
    pool: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in LOADS:
            raise UsageError(f"--load: expected one of {', '.join(LOADS)}, got {self.kind!r}")
        least = SHORTEST + WALK_FRAME
        if self.prompt < least:
            raise UsageError(f"--prompt: expected at least {least} tokens, got {self.prompt}")
        if self.answer < 2:
            raise UsageError(f"--answer: expected at least 2 tokens, got {self.answer}: the first one is timed alone")
        if self.kind == RETURNING and self.pool is None:
            raise UsageError("--load returning: it needs a server that says how many tokens its pool holds")
        if self.kind == RETURNING and self.flood > MOST_FLOOD:
            raise UsageError(
                f"--load returning: {self.flood:,} requests of {self.prompt} tokens fill the pool of {self.pool:,}, "
                f"expected at most {MOST_FLOOD:,}; use a larger --prompt, or start the servers with a smaller pool"
            )

    @property
    def name(self) -> str:
        size = f"{self.requests}x{self.prompt}+{self.answer}@{self.concurrency}"
        return size if self.kind in (SHARED, FRESH) else f"{size} {self.kind}"

    @property
    def flood(self) -> int:
        return -(-(self.pool or 0) * FLOOD_PERCENT // (100 * (self.prompt + WARM_ANSWER)))

    def check(self, parameters: Parameters, longest: int) -> None:
        if self.prompt + self.answer > longest:
            raise UsageError(
                f"--prompt {self.prompt} --answer {self.answer}: expected at most {longest} tokens together, as the "
                "server and its model take"
            )
        if self.prompt - WALK_FRAME > parameters.nodes:
            raise UsageError(f"--prompt: expected at most {parameters.nodes + WALK_FRAME}, as this model has nodes")


def draw(load: ServingLoad, questions: Questions, number: int) -> Round:
    places = load.prompt - WALK_FRAME
    drawn = _Draws(load.seed, number)
    groups = max(1, load.requests // GROUP)
    bases = [questions.walk(drawn.next(), places) for _ in range(groups)]
    tests = questions.has_marks and load.requests >= TESTS
    marks = questions.marks(drawn.next()) if tests else None
    warm = [questions.put(drawn.next(), each, WARM_ANSWER) for each in (*bases, *([] if marks is None else [marks]))]
    prefixes = [None if load.kind == FRESH else each.cut(places * 3 // 4) for each in bases]
    timed = []
    for at in range(load.requests):
        rng = drawn.next()
        subject: Subject
        if marks is not None and at % TESTS == TESTS - 1:
            subject = questions.marks(rng, prefix=None if load.kind == FRESH else marks)
        else:
            subject = questions.walk(rng, places, prefix=prefixes[at % groups])
        timed.append(questions.put(rng, subject, load.answer))
    flood = [  # drawn last: the others are those of the other kinds
        questions.put(drawn.next(), questions.walk(drawn.next(), places), WARM_ANSWER)
        for _ in range(load.flood if load.kind == RETURNING else 0)
    ]
    return Round(tuple(_wave(each, load.concurrency) for each in (warm, flood, timed) if each))


class _Draws:
    """A generator for each request, so that one request's draws move no other's."""

    def __init__(self, seed: int, number: int) -> None:
        self._own = Rng(seed * 1_000_003 + number)

    def next(self) -> Rng:
        return Rng(self._own.next_u64())


def _wave(questions: list[Question], concurrency: int) -> Wave:
    return Wave(orders=tuple(Order(question=question) for question in questions), concurrency=concurrency)
