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
    """input_scale, output_scale: trace tokens per job token. clamped: jobs that were cut to fit the pool."""

    jobs: tuple[Job, ...]
    input_scale: float
    output_scale: float
    clamped: int
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
