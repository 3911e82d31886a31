"""hicache: prefixes are evicted from the device by other requests, and requested again."""

from __future__ import annotations

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question, Served
from kvcheck.core.live.questions import QuestionSource
from kvcheck.core.live.scenarios.pressure import USUAL, subject
from kvcheck.core.live.scenarios.scenario import Round, ServerScenario, Sizes, wave_of

LONGEST_PROMPT = 600
FLOOD_PERCENT = 130
MOST_FLOOD = 400
"""Most requests of a flood; a larger pool is too large for this scenario, as the evidence then shows."""


def draw(questions: QuestionSource, rng: Rng, sizes: Sizes) -> Round:
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


def _why_not(served: Served) -> str | None:
    if served.has_host_tier is False and served.has_storage is False:
        return "this server has no host or storage tier"
    return None


def _unlikely(served: Served) -> str | None:
    if served.has_host_tier or served.has_storage:
        return None
    tier = "host tier" if served.has_host_tier is None else "storage tier"
    return f"the server does not report whether it has a {tier}"


HICACHE = ServerScenario(
    draw=draw, any_of=("host-hit", "storage-hit", "load-back"), why_not=_why_not, unlikely=_unlikely
)
