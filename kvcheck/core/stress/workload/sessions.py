"""Sessions: conversations with growing prompts, together larger than either tier.

Invariants:
- A session's next prompt is a leading part of its last one, at least one page long, followed by new tokens.
- One prompt in eight has no new tokens. At most one in eight shares a shorter part of the prefix of the prompt that
  arrives with it. Its lookup may split a node that is being loaded.
- prompt + output of a job is never more than half of the pool.
"""

from __future__ import annotations

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.stress.workload.jobs import LARGE_PAGE, Job, leading_runs, merge_runs


def session_jobs(page_size: int, capacity_tokens: int, *, requests: int, sessions: int, seed: int) -> tuple[Job, ...]:
    """Jobs for a pool of `capacity_tokens`, two in each round.

    Sessions take turns, so that the others push a prefix down a tier before it comes back. One job in four belongs to a
    random session. New text is a fraction of a page to two pages long; half of the prompts end with a page, or one
    token before or behind its end. Half of the outputs are shorter than half a page, the others reach two pages, so
    running requests need more than the pool; large pages are crossed once.
    """
    half = capacity_tokens // 2
    if half < 3 * page_size or requests < 1 or sessions < 1:
        raise UsageError(
            f"session requests: expected a pool of at least 6 pages of {page_size} tokens, and at least 1 request and "
            f"1 session; got {capacity_tokens} tokens, {requests} and {sessions}"
        )
    short, long = _output_bounds(page_size)
    mix, repeats, twins = Rng(seed), Rng(seed ^ 0xA6A1), Rng(seed ^ 0x7815)
    pair: tuple[tuple[tuple[int, int], ...], int] = (), 0
    last: dict[int, tuple[tuple[int, int], ...]] = {}
    jobs: list[Job] = []
    for request in range(1, requests + 1):
        session = mix.below(sessions) if mix.chance(1, 4) else request % sessions
        before = last.get(session, ())
        kept = _kept(mix, sum(tokens for _, tokens in before), page_size)
        cut, is_twin = twins.below(max(1, pair[1] // page_size - 1)), twins.chance(1, 4)
        is_twin = is_twin and request % 2 == 1 and pair[1] >= 2 * page_size
        if is_twin:
            before, kept = pair[0], page_size * (1 + cut)
        output = 1 + mix.below(short if mix.chance(1, 2) else long)
        new = 1 + mix.below(2 * page_size)
        near = mix.below(6) - 1
        if near <= 1:  # half of the prompts end at the end of a page, or one token beside it
            to_edge = -kept % page_size + near + page_size * (new > page_size)
            new = to_edge if to_edge > 0 else to_edge + page_size
        room = half - output
        kept = min(kept, max(0, room - 1) // page_size * page_size)
        new = 0 if kept and repeats.chance(1, 8) else max(1, min(new, room - kept))
        blocks = merge_runs([*leading_runs(before, kept), *[(request, new)] * (new > 0)])
        speculative = mix.chance(1, 4)
        jobs.append(
            Job(
                request=request,
                arrival=request // 2,
                prompt_tokens=kept + new,
                output_tokens=output,
                blocks=blocks,
                wants_logprobs=mix.chance(1, 4),
                speculative=speculative,
                wants_hidden=mix.chance(1, 2) and speculative,
            )
        )
        pair = before, kept
        if not is_twin:
            last[session] = blocks
    return tuple(jobs)


def _output_bounds(page: int) -> tuple[int, int]:
    if page < LARGE_PAGE:
        return max(1, page // 2), 2 * page
    return page // 8, page + page // 4


def _kept(mix: Rng, tokens: int, page: int) -> int:
    if tokens <= page:
        return tokens
    draw = mix.below(4)
    if draw < 2:
        return tokens
    whole = page * (1 + mix.below(tokens // page))
    return whole if draw == 2 else min(tokens, page + mix.below(tokens - page))
