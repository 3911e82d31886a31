"""prefix-cache: shared prefixes of unequal cuts, next turns of conversations, and returns after other requests.

Invariants:
- Each shared prefix is computed by one request of the first wave before others hit it in the second.
- Cuts lie anywhere in a page, so hits end inside pages too.
"""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import QuestionSource, Subject
from kvcheck.core.live.scenarios.scenario import Round, ServerScenario, Sizes, wave_of

LONGEST_PROMPT = 400


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    bases = [_base(questions, rng, sizes, number) for number in range(max(2, sizes.requests // 6))]
    starts = [rng.below(len(subject.values) // 2) for subject in bases]
    first = [
        questions.put(rng, subject, questions.cover(subject), start=start)
        for subject, start in zip(bases, starts, strict=True)
    ]
    second = []
    for number in range(sizes.requests // 2):
        which = rng.below(len(bases)) if number else 0
        subject = _shared(questions, rng, bases[which])
        # One ends in the token that the first one ends in, and goes another way after the shared part. The others
        # are at other places: several wrong requests are more evidence about a shared page than one.
        start = None if number else starts[which]
        second.append(questions.put(rng, subject, questions.cover(subject), start=start))
    room = questions.longest - 16
    open_walks = [
        question
        for question, subject in zip(first, bases, strict=True)
        if subject.is_walk and len(question.ids) + len(question.expected) < room
    ]
    turns = max(0, sizes.requests - len(first) - len(second) - 1) if open_walks else 0
    third = [questions.again(rng, open_walks[rng.below(len(open_walks))], 16 + rng.below(32)) for _ in range(turns)]
    return Round(
        tuple(wave_of(wave, sizes) for wave in (first, second, [*third, first[rng.below(len(first))]]) if wave)
    )


def _base(questions: QuestionSource, rng: Rng, sizes: Sizes, number: int) -> Subject:
    """The first is a walk, the second a position test if one fits, of the others one in four."""
    most = min(sizes.longest * 3 // 5, LONGEST_PROMPT)
    length = most // 4 + rng.below(most - most // 4)
    is_drawn = rng.chance(1, 4)
    if questions.has_marks and number and (number == 1 or is_drawn):
        return questions.marks(rng)
    return questions.walk(rng, length)


def _shared(questions: QuestionSource, rng: Rng, base: Subject) -> Subject:
    size = len(base.values)
    cut = base.cut(size // 2 + rng.below(size - size // 2))
    more = len(cut.values) + 2 + rng.below(size // 2 + 1)
    return questions.walk(rng, more, prefix=cut) if base.is_walk else questions.marks(rng, prefix=cut)


PREFIX_CACHE = ServerScenario(draw=draw, needs={"hit": 1})
