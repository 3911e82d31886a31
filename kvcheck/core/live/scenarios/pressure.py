"""Lengths of requests that together need more than a server's pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import WALK_FRAME, QuestionSource, Subject
from kvcheck.core.live.scenarios.scenario import Sizes

USUAL = 280
MOST = 2048
"""Most tokens of a request and its answer: longer ones take time and reach nothing else."""
OVER_PERCENT = 140
"""Part of the pool that concurrent requests need at their end."""


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
