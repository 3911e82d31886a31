"""How long requests have to be for so many of them to need more than a server's pool.

Invariants:
- A pool of unknown size is pressed with the usual lengths: what came of it is told by the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import WALK_FRAME, QuestionSource, Subject
from kvcheck.core.live.scenarios.scenario import Sizes

USUAL = 280
MOST = 2048
"""Tokens of a request and its answer: longer ones take time and reach nothing else, but for a pool that needs them."""
OVER_PERCENT = 140
"""What runs at a time needs so much of the pool, at its end."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its answer, on average."""

    prompt: int
    answer: int

    def draw(self, rng: Rng) -> Lengths:
        """From three quarters to five quarters of each."""
        return Lengths(*(size * 3 // 4 + rng.below(size // 2 + 1) for size in (self.prompt, self.answer)))


def pressing(sizes: Sizes) -> Lengths:
    """Lengths at which `sizes.concurrency` requests need more than the pool: half prompt, half answer, since it is
    decode that runs out of memory."""
    wanted = USUAL if sizes.pool is None else sizes.pool * OVER_PERCENT // 100 // sizes.concurrency
    # A drawn request is up to five quarters as long.
    total = min(max(wanted, USUAL), MOST, sizes.longest * 4 // 5)
    return Lengths(prompt=total // 2, answer=total - total // 2)


def subject(questions: QuestionSource, rng: Rng, length: int, *, prefix: Subject | None = None) -> Subject:
    """One in four is a position test, where it fits, of its own length; the others are walks. prefix: how it begins."""
    if prefix is not None:
        return questions.walk(rng, length, prefix=prefix) if prefix.is_walk else questions.marks(rng, prefix=prefix)
    if questions.has_marks and rng.chance(1, 4):
        return questions.marks(rng)
    return questions.walk(rng, length - WALK_FRAME)
