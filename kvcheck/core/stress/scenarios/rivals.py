"""Rivals: requests that share a prefix with another and part from it inside a page, at its end, or one token beside it.

Invariants:
- prompt + output of a rival is never more than half of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.hicache.storage import chain_hashes
from kvcheck.core.stress.workload.decoder import prompt_tokens
from kvcheck.core.stress.workload.jobs import Job, leading_runs, merge_runs

CUTS = 5
"""At a page's end, one token more, one less, half a page further, and behind the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A job held back until its shared prefix is in a certain state. of: the request that it begins like. chain: the
    name of each whole page of that request's prompt. shared: how many of those a lookup of the rival can find."""

    job: Job
    of: int
    chain: tuple[str, ...]
    shared: int


def rivals_of(jobs: Sequence[Job], page_size: int, capacity_tokens: int, *, count: int, seed: int) -> tuple[Rival, ...]:
    long = [job for job in jobs if job.prompt_tokens > 2 * page_size]
    mix = Rng(seed ^ 0x5EED)
    rivals: list[Rival] = []
    for number in range(count if long else 0):
        of = long[(number * len(long) // count + mix.below(2)) % len(long)]
        rivals.append(_rival(mix, of, behind=jobs[-1], number=number, page=page_size, half=capacity_tokens // 2))
    return tuple(rivals)


def _rival(mix: Rng, of: Job, *, behind: Job, number: int, page: int, half: int) -> Rival:
    request = behind.request + 1 + number
    output = 1 + mix.below(4)
    at = page * (1 + mix.below(of.prompt_tokens // page))
    cut = (at, at + 1, at - 1, at + page // 2, of.prompt_tokens)[number % CUTS]
    cut = max(1, min(cut, of.prompt_tokens, half - output - 1))
    new = min(1 + mix.below(page + page // 2), half - output - cut)
    job = Job(
        request=request,
        arrival=behind.arrival,
        prompt_tokens=cut + new,
        output_tokens=output,
        blocks=merge_runs([*leading_runs(of.blocks, cut), (request, new)]),
        wants_logprobs=False,
        speculative=False,
        wants_hidden=False,
    )
    tokens = prompt_tokens(of)
    pages = [tokens[at : at + page].tobytes() for at in range(0, of.prompt_tokens // page * page, page)]
    chain = tuple(each.hex() for each in chain_hashes(pages))
    return Rival(job=job, of=of.request, chain=chain, shared=min(cut, cut + new - 1) // page)
