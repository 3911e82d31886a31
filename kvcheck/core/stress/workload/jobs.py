"""Job and Workload: the requests for a scheduler, with the author of every prompt token.

Content is named by (author, position). An author is the request that first brought the prefix, so two prompts hold the
same token at a position exactly if the authors are the same.

Invariants:
- A job's runs add up to its prompt, hold at least one token each, and neighbouring runs have different authors.
- No run names an author that comes after the job.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng

LARGE_PAGE = 32
"""Tokens of a page from which on outputs cross fewer pages, as each token costs a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """request: 1-based id, dense, in order of arrival. arrival: virtual scheduling round. blocks: (author, tokens) runs
    of the prompt. wants_hidden implies speculative: hidden states are handed over for speculative decoding only."""

    request: int
    arrival: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[tuple[int, int], ...]
    wants_logprobs: bool
    speculative: bool
    wants_hidden: bool

    def __post_init__(self) -> None:
        assert self.request >= 1, f"job {self.request}: ids start at 1"
        assert self.arrival >= 0, f"job {self.request}: arrival round {self.arrival} is before round 0"
        assert self.prompt_tokens >= 1, f"job {self.request}: prompt of {self.prompt_tokens} tokens"
        assert self.output_tokens >= 1, f"job {self.request}: output of {self.output_tokens} tokens"
        total = sum(tokens for _, tokens in self.blocks)
        assert total == self.prompt_tokens, (
            f"job {self.request}: runs add up to {total}, prompt has {self.prompt_tokens}"
        )
        for author, tokens in self.blocks:
            assert 1 <= author <= self.request and tokens >= 1, f"job {self.request}: bad run ({author}, {tokens})"
        assert self.speculative or not self.wants_hidden, f"job {self.request}: hidden states without speculation"

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def own_prompt_tokens(self) -> int:
        return sum(tokens for author, tokens in self.blocks if author == self.request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    jobs: tuple[Job, ...]
    note: str


def token_authors(job: Job) -> npt.NDArray[np.int64]:
    """Author of every position: [prompt_tokens + output_tokens]; a request authors its own outputs."""
    runs = (*job.blocks, (job.request, job.output_tokens))
    authors, counts = np.array(runs, dtype=np.int64).T
    repeated: npt.NDArray[np.int64] = np.repeat(authors, counts)
    return repeated


def leading_runs(blocks: tuple[tuple[int, int], ...], tokens: int) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for author, count in blocks:
        if tokens <= 0:
            break
        kept.append((author, min(count, tokens)))
        tokens -= count
    return kept


def merge_runs(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for author, tokens in runs:
        if not tokens:
            continue
        if merged and merged[-1][0] == author:
            merged[-1] = (author, merged[-1][1] + tokens)
        else:
            merged.append((author, tokens))
    return tuple(merged)


def session_jobs(page_size: int, capacity_tokens: int, *, requests: int, sessions: int, seed: int) -> tuple[Job, ...]:
    """Two jobs a round. Sessions take turns, so that the others push a prefix down a tier before it comes back.

    Half of the outputs are shorter than half a page, the others reach two pages, so that running requests need more
    than the pool; large pages are crossed once.
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
