"""prefix-cache, hicache, pd-transfer: prefixes that are shared, come back after an eviction, or move to another server.

Invariants:
- prefix-cache: each shared prefix is computed by one request of the first wave before others hit it in the second.
  Cuts lie anywhere in a page, so hits end inside pages too.
- pd-transfer: lengths also lie around page edges: the last page of a transfer is full, nearly full or nearly empty.
"""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question, Served
from kvcheck.core.live.questions import QuestionSource, Subject
from kvcheck.core.live.scenarios.pressure import USUAL, subject
from kvcheck.core.live.scenarios.scenario import Order, Round, ServerScenario, Sizes, Wave, wave_of

LONGEST_SHARED = 400
LONGEST_PROMPT = 600
"""Of hicache and pd-transfer."""
FLOOD_PERCENT = 130
MOST_FLOOD = 400
"""Most requests of a flood; a larger pool is too large for this scenario, as the evidence then shows."""
EDGE = 16


def prefix_cache(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    bases = [_base(questions, rng, sizes, number) for number in range(max(2, sizes.requests // 6))]
    starts = [rng.below(len(base.values) // 2) for base in bases]
    first = [
        questions.put(rng, base, questions.cover(base), start=start) for base, start in zip(bases, starts, strict=True)
    ]
    second = []
    for number in range(sizes.requests // 2):
        which = rng.below(len(bases)) if number else 0
        shared = _shared(questions, rng, bases[which])
        # One ends in the token that the first one ends in, and goes another way after the shared part. The others
        # are at other places: several wrong requests are more evidence about a shared page than one.
        start = None if number else starts[which]
        second.append(questions.put(rng, shared, questions.cover(shared), start=start))
    room = questions.longest - 16
    open_walks = [
        question
        for question, base in zip(first, bases, strict=True)
        if base.is_walk and len(question.ids) + len(question.expected) < room
    ]
    turns = max(0, sizes.requests - len(first) - len(second) - 1) if open_walks else 0
    third = [questions.again(rng, open_walks[rng.below(len(open_walks))], 16 + rng.below(32)) for _ in range(turns)]
    return Round(
        tuple(wave_of(wave, sizes) for wave in (first, second, [*third, first[rng.below(len(first))]]) if wave)
    )


def hicache(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
    most = min(sizes.longest * 3 // 5, LONGEST_PROMPT)
    kept = [subject(questions, rng, most // 2 + rng.below(most // 2)) for _ in range(max(2, sizes.requests // 4))]
    first = [questions.put(rng, each, 8) for each in kept]
    flood_tokens = sizes.requests * USUAL if sizes.pool is None else sizes.pool * FLOOD_PERCENT // 100
    flood: list[Question] = []
    while flood_tokens > 0 and len(flood) < MOST_FLOOD:
        other = subject(questions, rng, most * 3 // 4 + rng.below(most // 4))
        flood.append(questions.put(rng, other, 8))
        flood_tokens -= len(flood[-1].ids) + len(flood[-1].expected)
    back = []
    for each in kept:
        size = len(each.values)
        cut = each.cut(size * 3 // 4 + rng.below(size // 4))
        again = subject(questions, rng, len(cut.values) + 2 + rng.below(24), prefix=cut)
        back.append(questions.put(rng, again, questions.cover(again)))
    return Round(tuple(wave_of(wave, sizes) for wave in (first, flood, back)))


def pd_transfer(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
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


def _base(questions: QuestionSource, rng: Rng, sizes: Sizes, number: int) -> Subject:
    """The first is a walk, the second a position test if one fits, of the others one in four."""
    most = min(sizes.longest * 3 // 5, LONGEST_SHARED)
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


def _why_not(served: Served) -> str | None:
    if served.has_host_tier is False and served.has_storage is False:
        return "this server has no host or storage tier"
    return None


def _unlikely(served: Served) -> str | None:
    if served.has_host_tier or served.has_storage:
        return None
    tier = "host tier" if served.has_host_tier is None else "storage tier"
    return f"the server does not report whether it has a {tier}"


PREFIX_CACHE = ServerScenario(draw=prefix_cache, needs={"hit": 1})
HICACHE = ServerScenario(
    draw=hicache, any_of=("host-hit", "storage-hit", "load-back"), why_not=_why_not, unlikely=_unlikely
)
PD_TRANSFER = ServerScenario(
    draw=pd_transfer,
    needs={"transfer": 1},
    unlikely=lambda served: None if served.mode == "pair" else "no pair of a prefill and a decode server was named",
)
