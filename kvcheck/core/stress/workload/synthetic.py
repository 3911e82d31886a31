"""Synthetic requests: jobs whose lengths lie at or next to page and chunk boundaries, and the sample trace.

Invariants:
- prompt + output of a job is never more than half of the pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.stress.workload.jobs import LARGE_PAGE, Job, leading_runs, merge_runs
from kvcheck.core.stress.workload.traces import BLOCK_TOKENS, TraceRow, read_trace

SAMPLE: Final = "sample"
SAMPLE_SEED: Final = 20250221
SAMPLE_REQUESTS: Final = 400

_RECENT: Final = 12  # a prefix is shared with one of the last twelve requests; most of those are still cached


def synthetic_jobs(
    shape_page_size: int, capacity_tokens: int, *, requests: int, seed: int, chunk_tokens: int, longer_pages: int = 0
) -> tuple[Job, ...]:
    """Jobs for a pool of `capacity_tokens`, whose demand is 1.3 times the supply.

    A burst ends when its tokens, shared ones counted once, exceed one and a half pools. The next burst comes after

        sum of (total tokens * output tokens) / (1.3 * capacity)

    rounds. 64 requests exhaust a pool of up to 64 pages while they decode; a pool of a thousand pages needs a few
    hundred requests. longer_pages: added to each output, if half of the pool has room.
    """
    page, half = shape_page_size, capacity_tokens // 2
    if page < 1 or chunk_tokens < 1 or requests < 1:
        raise UsageError(
            "synthetic requests: expected page size, chunk and number of requests of at least 1, "
            f"got {page}, {chunk_tokens} and {requests}"
        )
    if half < 2 * page + 2:
        raise UsageError(
            f"synthetic requests: expected a pool of at least {4 * page + 4} tokens for pages of {page}, "
            f"got {capacity_tokens}; use more pages"
        )
    mix = Rng(seed)
    jobs: list[Job] = []
    deck: list[int] = []
    arrival = burst_tokens = burst_work = 0
    for request in range(1, requests + 1):
        if request % 2:
            prompt = _prompt_length(mix, page=page, chunk=chunk_tokens, capacity=capacity_tokens)
        else:
            deck = deck or _edge_lengths(page=page, chunk=chunk_tokens, most=half - 2)
            prompt = deck.pop(mix.below(len(deck)))
        output = _output_length(mix, prompt=prompt, page=page, pages=capacity_tokens // page) + longer_pages * page
        output = min(output, half - prompt)
        shared = _shared_run(mix, jobs, prompt=prompt, page=page)
        speculative = mix.chance(1, 4)
        job = Job(
            request=request,
            arrival=arrival,
            prompt_tokens=prompt,
            output_tokens=output,
            blocks=merge_runs([*shared, (request, prompt - sum(tokens for _, tokens in shared))]),
            wants_logprobs=mix.chance(1, 4),
            speculative=speculative,
            wants_hidden=mix.chance(1, 2) and speculative,
        )
        jobs.append(job)
        burst_tokens += job.own_prompt_tokens + output
        burst_work += job.total_tokens * output
        if 2 * burst_tokens > 3 * capacity_tokens:
            arrival += 1 + 10 * burst_work // (13 * capacity_tokens)
            burst_tokens = burst_work = 0
    return tuple(jobs)


def trace_rows(name: str, limit: int | None) -> tuple[TraceRow, ...]:
    """name: "sample" (invented), or that of a file; "./sample" is a file of that name."""
    if name == SAMPLE:
        return sample_trace_rows(requests=SAMPLE_REQUESTS, seed=SAMPLE_SEED)[:limit]
    return read_trace(Path(name), limit)


def sample_trace_rows(*, requests: int, seed: int) -> tuple[TraceRow, ...]:
    """A turn repeats hash ids of full blocks only, because a partial block changes its content when it fills up."""
    mix = Rng(seed)
    systems = [tuple(range(first, first + count)) for first, count in ((0, 1), (1, 2), (3, 4))]
    next_id = 7
    talks: list[tuple[tuple[int, ...], int]] = []  # (ids of the full blocks, tokens so far)
    rows: list[TraceRow] = []
    timestamp = 0
    for _ in range(requests):
        if talks and mix.chance(2, 5):
            ids, tokens = talks.pop(mix.below(len(talks)))
        else:
            ids = systems[mix.below(len(systems))]
            tokens = len(ids) * BLOCK_TOKENS
        tokens += 1 + mix.below(1500)
        if mix.chance(1, 10):
            tokens += mix.below(24_000)
        needed = -(-tokens // BLOCK_TOKENS)
        fresh = tuple(range(next_id, next_id + needed - len(ids)))
        next_id += len(fresh)
        ids = (*ids, *fresh)
        output = 1 + mix.below(40) if mix.chance(1, 5) else 60 + mix.below(500)
        rows.append(TraceRow(timestamp_ms=timestamp, input_length=tokens, output_length=output, hash_ids=ids))
        if tokens < 60_000:
            talks.append((ids[: tokens // BLOCK_TOKENS], tokens + output))
        if mix.chance(1, 3):
            timestamp += 1000 * (1 + mix.below(8))
    return tuple(rows)


def _edge_lengths(*, page: int, chunk: int, most: int) -> list[int]:
    edges = {many * unit + near for unit in (page, chunk) for many in (1, 2) for near in (-1, 0, 1)}
    return sorted(length for length in {1, *edges} if 1 <= length <= most)


def _prompt_length(mix: Rng, *, page: int, chunk: int, capacity: int) -> int:
    kind, near = mix.below(8), mix.below(3) - 1
    far_pages = max(3, capacity // (6 * page))
    multiples = (1 + mix.below(3), 1 + mix.below(far_pages))
    if kind == 0:
        length = 1
    elif kind <= 2:
        length = multiples[0] * page + near
    elif kind <= 4:
        length = multiples[0] * chunk + near
    else:
        length = multiples[1] * page + near
    # A chunk can be larger than the pool. The cut then falls on a page boundary.
    most = (capacity // 2 - 2) // page * page
    return max(1, length if length <= most else most + near)


def _output_length(mix: Rng, *, prompt: int, page: int, pages: int) -> int:
    """Most outputs continue for up to a sixteenth of the pool, so that ten requests use up the last pages."""
    to_end = -prompt % page
    choices = [1, to_end, to_end + 1, to_end + 2]
    if page < LARGE_PAGE:
        choices += [to_end + page, to_end + page + 1]
    kind, more = mix.below(len(choices)), mix.below(1 + pages // 16) * page
    return max(1, choices[kind] + (more if kind > 1 else 0))


def _shared_run(mix: Rng, jobs: list[Job], *, prompt: int, page: int) -> list[tuple[int, int]]:
    wanted, pick, kind, extra = mix.chance(1, 3), mix.next_u64(), mix.below(4), mix.below(page)
    if not wanted or not jobs:
        return []
    recent = jobs[-_RECENT:]
    leader = recent[pick % len(recent)]
    most = min(prompt, leader.prompt_tokens)
    aligned = most // page * page
    tokens = (aligned, min(most, max(0, aligned - page) + extra), most, min(most, page))[kind]
    return leading_runs(leader.blocks, tokens)
