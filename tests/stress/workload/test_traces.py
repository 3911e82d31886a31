"""Traces, scaling, synthetic jobs and the generator behind them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.rng import Rng
from kvcheck.core.stress.workload.jobs import Job, Workload, token_authors
from kvcheck.core.stress.workload.synthetic import synthetic_jobs, trace_rows
from kvcheck.core.stress.workload.traces import BLOCK_TOKENS, TraceRow, read_trace, scale_trace

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


def line(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def trace(path: Path, *lines: str) -> Path:
    path.write_text("".join(one + "\n" for one in lines))
    return path


def row(*hash_ids: int, tokens: int | None = None, output: int = 10, at: int = 0) -> TraceRow:
    length = len(hash_ids) * BLOCK_TOKENS if tokens is None else tokens
    return TraceRow(timestamp_ms=at, input_length=length, output_length=output, hash_ids=hash_ids)


# splitmix64


def test_mix_gives_the_published_values() -> None:
    # The first outputs of splitmix64 for seed 1234567, as its public reference implementations print them.
    mix = Rng(1234567)
    assert [mix.next_u64() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_mix_draws_stay_in_range_and_are_roughly_even() -> None:
    mix = Rng(-1)
    draws = [mix.below(7) for _ in range(7000)]
    assert set(draws) == set(range(7))
    assert all(850 < draws.count(value) < 1150 for value in range(7))  # 1000 expected, standard deviation 29
    assert not any(mix.chance(0, 3) for _ in range(100))
    assert all(mix.chance(3, 3) for _ in range(100))


# Reading


def test_a_trace_is_read_in_order_and_up_to_its_limit(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", line(), line(timestamp=6, extra="ignored"), "damaged, but never reached")
    assert read_trace(path, 2) == (
        TraceRow(timestamp_ms=5, input_length=600, output_length=7, hash_ids=(0, 1)),
        TraceRow(timestamp_ms=6, input_length=600, output_length=7, hash_ids=(0, 1)),
    )
    path.write_text(line())
    assert len(read_trace(path, None)) == 1, "the last line needs no newline"


@pytest.mark.parametrize(
    ("second", "expected", "got"),
    [
        (line()[:40], "one complete JSON object", "{"),
        ("", "one complete JSON object", "''"),
        ("[" * 100_000, "one complete JSON object", "[["),
        ("[1, 2]", "one JSON object", "[1, 2]"),
        ("7", "one JSON object", "7"),
        ("{}", "'timestamp'", "no keys"),
        ('{"timestamp": 5}', "'input_length'", "'timestamp'"),
        (line(timestamp=4), "at least 5, the line before", "4"),
        *((line(timestamp=each), "an integer from 0 to 2147483647", str(each)[:4]) for each in (-1, 1.5, 10**40)),
        *((line(input_length=each), "an integer from 1 to 2147483647", repr(each)) for each in (True, 0, "600")),
        *((line(output_length=each), "an integer from 1 to 2147483647", repr(each)) for each in (0, None)),
        (line(hash_ids=None), "a list of integers", "None"),
        *((line(hash_ids=[0, each]), "integers of at least 0", repr(each)) for each in ("1", True, -1)),
        *((line(hash_ids=[*range(count)]), "2 ids, one for each block of 512 of 600", str(count)) for count in (1, 3)),
    ],
)
def test_a_damaged_line_is_named_with_what_was_expected_and_found(
    tmp_path: Path, second: str, expected: str, got: str
) -> None:
    path = trace(tmp_path / "t.jsonl", line(), second)
    with pytest.raises(UsageError) as caught:
        read_trace(path, None)
    place, _, told = str(caught.value).removeprefix(str(path)).partition(": ")
    assert (place, "\n" in told, len(told) < 240) == (":2", False, True)
    assert expected in told and got in told.rpartition("got ")[2]


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line().encode() + b"\n" + b'{"timestamp": "\xff"}\n')
    with pytest.raises(UsageError, match=r"t\.jsonl:2: expected UTF-8 text, got byte 0xff"):
        read_trace(path, None)


@pytest.mark.parametrize(
    ("name", "limit", "told"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("", None, "not a file"),
        ("empty.jsonl", None, "an empty file"),
        ("t.jsonl", 0, "a limit of at least 1 request, got 0"),
    ],
)
def test_a_path_that_is_no_trace_is_refused(tmp_path: Path, name: str, limit: int | None, told: str) -> None:
    trace(tmp_path / "empty.jsonl")
    trace(tmp_path / "t.jsonl", line())
    with pytest.raises(UsageError, match=told):
        read_trace(tmp_path / name, limit)


# Scaling


def test_equal_prefixes_share_and_equal_ids_after_another_prefix_do_not() -> None:
    rows = (row(1, 2, 3), row(1, 2, 4), row(9, 2, 3), row(1, 2, 4, 5))
    jobs = scale_trace(rows, 256, seed=0, mean_output=4).jobs
    size = jobs[0].prompt_tokens // 3
    assert [job.prompt_tokens for job in jobs] == [3 * size, 3 * size, 3 * size, 4 * size]
    assert [job.blocks for job in jobs] == [
        ((1, 3 * size),),
        ((1, 2 * size), (2, size)),
        ((3, 3 * size),),
        ((1, 2 * size), (2, size), (4, size)),
    ]


def test_a_partial_last_block_is_shared_with_a_longer_prompt_of_the_same_id() -> None:
    rows = (row(1, 2, tokens=512 + 256), row(1, 2, 3), row(1, 2, tokens=512 + 128))
    workload = scale_trace(rows, 512, seed=0, mean_output=4)
    size = block_of(workload)
    assert [job.blocks for job in workload.jobs] == [
        ((1, size + size // 2),),
        ((1, size + size // 2), (2, size - size // 2 + size)),
        ((1, size + size // 4),),
    ]


def random_rows(seed: int, count: int) -> tuple[TraceRow, ...]:
    """Rows over a small tree of ids, the same id in several places, some last blocks partial."""
    mix = Rng(seed)
    rows: list[TraceRow] = []
    for index in range(count):
        blocks = 1 + mix.below(6)
        ids = tuple(10 * place + mix.below(2) for place in range(blocks))
        tail = BLOCK_TOKENS if mix.chance(1, 2) else 1 + mix.below(BLOCK_TOKENS)
        rows.append(row(*ids, tokens=(blocks - 1) * BLOCK_TOKENS + tail, output=1 + mix.below(500), at=7 * index))
    return tuple(rows)


def block_of(workload: Workload) -> int:
    """Tokens that a block became."""
    return int(re.findall(r"became (\d+):", workload.note)[0])


def brute_force_authors(rows: tuple[TraceRow, ...], jobs: tuple[Job, ...], size: int) -> list[list[int]]:
    """For each token of each job, the first job with the same chain of ids up to there and a prompt that reaches it."""
    return [
        [
            next(
                earlier.request
                for earlier, other in zip(jobs, rows, strict=True)
                if earlier.prompt_tokens > position
                and other.hash_ids[: position // size + 1] == one.hash_ids[: position // size + 1]
            )
            for position in range(job.prompt_tokens)
        ]
        for job, one in zip(jobs, rows, strict=True)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [40, 96, 700])
def test_authors_equal_the_brute_force_rule(seed: int, capacity: int) -> None:
    rows = random_rows(seed, 40)
    workload = scale_trace(rows, capacity, seed=seed)
    size = block_of(workload)
    expected = brute_force_authors(rows, workload.jobs, size)
    for job, authors in zip(workload.jobs, expected, strict=True):
        assert token_authors(job).tolist() == authors + [job.request] * job.output_tokens


def assert_jobs_are_sound(jobs: tuple[Job, ...], capacity: int) -> None:
    """Ids, order, sizes, and that every author holds the very token it is named for."""
    assert [job.request for job in jobs] == list(range(1, len(jobs) + 1))
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    authors = [token_authors(job) for job in jobs]
    for job, own in zip(jobs, authors, strict=True):
        assert own.shape == (job.total_tokens,)
        assert job.total_tokens <= capacity // 2
        assert all(left[0] != right[0] for left, right in zip(job.blocks, job.blocks[1:], strict=False))
        start = 0
        for author, tokens in job.blocks:
            assert start + tokens <= jobs[author - 1].prompt_tokens
            assert (authors[author - 1][start : start + tokens] == author).all()
            start += tokens


@pytest.mark.parametrize("capacity", [32, 64, 256, 1024, 4096])
def test_the_sample_trace_fits_every_pool(capacity: int) -> None:
    rows = trace_rows("sample", None)
    workload = scale_trace(rows, capacity, seed=3)
    assert len(workload.jobs) == len(rows)
    assert_jobs_are_sound(workload.jobs, capacity)
    if capacity >= 512:
        prompt = np.mean([job.prompt_tokens for job in workload.jobs])
        output = np.mean([job.output_tokens for job in workload.jobs])
        assert capacity / 18 <= prompt <= capacity / 10
        assert 16 <= output <= 24


def test_what_is_cut_is_counted_and_said() -> None:
    rows = (row(*range(200)), row(500), row(501, output=4))
    workload = scale_trace(rows, 64, seed=0)
    assert workload.jobs[0].total_tokens <= 32
    assert "cut to fit: 1 prompts, 0 outputs" in workload.note
    assert "cut to fit: 0 prompts, 0 outputs" in scale_trace((row(1), row(2)), 64, seed=0).note


def test_arrivals_follow_the_timestamps_and_overload_the_pool() -> None:
    rows = tuple(row(index, output=300, at=100 * index) for index in range(101))
    workload = scale_trace(rows, 1024, seed=0, mean_output=20)
    jobs = workload.jobs
    rounds = 101 * 20 * jobs[0].total_tokens / (1.3 * 1024)
    assert jobs[-1].arrival == pytest.approx(rounds, abs=1)
    assert jobs[50].arrival == pytest.approx(rounds / 2, abs=1)


def test_scaling_is_a_function_of_its_arguments() -> None:
    rows = random_rows(1, 50)
    assert scale_trace(rows, 512, seed=1) == scale_trace(rows, 512, seed=1)
    assert scale_trace(rows, 512, seed=1).jobs != scale_trace(rows, 512, seed=2).jobs
    flags = [(job.wants_logprobs, job.speculative, job.wants_hidden) for job in scale_trace(rows, 512, seed=1).jobs]
    assert {True, False} == {one for one, _, _ in flags}
    assert {(True, True), (True, False), (False, False)} == {(spec, hidden) for _, spec, hidden in flags}


@pytest.mark.parametrize(
    ("rows", "capacity", "output", "told"),
    [
        ((row(1),), 31, 20, "at least 32 tokens, got 31"),
        ((), 64, 20, "at least one request, got none"),
        ((row(1),), 64, 0, "at least 1 token, got 0"),
    ],
)
def test_a_workload_that_cannot_be_scaled_is_refused(
    rows: tuple[TraceRow, ...], capacity: int, output: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        scale_trace(rows, capacity, seed=0, mean_output=output)


# The sample


def test_the_sample_has_shared_prefixes_and_partial_blocks() -> None:
    rows = trace_rows("sample", None)
    jobs = scale_trace(rows, 1024, seed=0).jobs
    shared = sum(job.prompt_tokens - job.own_prompt_tokens for job in jobs) / sum(job.prompt_tokens for job in jobs)
    assert len(rows) == 400
    assert 0.3 < shared < 0.7
    assert sum(one.input_length % BLOCK_TOKENS != 0 for one in rows) > 300


# Synthetic jobs


def test_synthetic_lengths_lie_round_every_boundary() -> None:
    page, chunk = 16, 40
    jobs = synthetic_jobs(page, 1024, requests=600, seed=0, chunk_tokens=chunk)
    prompts = {job.prompt_tokens for job in jobs}
    wanted = {n * unit + near for unit in (page, chunk) for n in (1, 2, 3) for near in (-1, 0, 1)} | {1}
    assert wanted <= prompts
    ends = {job.total_tokens % page for job in jobs}
    assert {0, 1, 2} <= ends
    crossed = [pages_for(job.total_tokens, page) - pages_for(job.prompt_tokens, page) for job in jobs]
    assert {0, 1, 2} <= set(crossed)


@pytest.mark.parametrize("page", [4, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_a_small_workload_has_prompts_at_every_edge_of_a_page(page: int, seed: int) -> None:
    """Lengths by chance alone left most edges out of the eight requests of a schedule."""
    jobs = synthetic_jobs(page, 9 * page, requests=12 * 2, seed=seed, chunk_tokens=page + 1)
    prompts = {job.prompt_tokens for job in jobs}
    assert {1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 2 * page + 2} <= prompts
    few = synthetic_jobs(page, 9 * page, requests=8, seed=seed, chunk_tokens=page + 1)
    edges = {1, *(n * unit + near for unit in (page, page + 1) for n in (1, 2) for near in (-1, 0, 1))}
    assert sum(job.prompt_tokens in edges for job in few) >= 4


def test_synthetic_prefixes_are_shared_at_aligned_and_unaligned_lengths() -> None:
    page = 8
    jobs = synthetic_jobs(page, 1024, requests=400, seed=0, chunk_tokens=32)
    shared = [job.prompt_tokens - job.own_prompt_tokens for job in jobs if job.own_prompt_tokens < job.prompt_tokens]
    assert len(shared) > 60
    assert any(tokens % page == 0 for tokens in shared)
    assert any(tokens % page for tokens in shared)
    assert any(job.own_prompt_tokens == 0 for job in jobs)
    assert len({job.arrival for job in jobs}) < len(jobs) / 4  # bursts


def test_fewer_synthetic_jobs_are_the_first_of_more_and_a_seed_gives_others() -> None:
    first = synthetic_jobs(8, 512, requests=50, seed=1, chunk_tokens=32)
    assert first[:20] == synthetic_jobs(8, 512, requests=20, seed=1, chunk_tokens=32)
    assert first != synthetic_jobs(8, 512, requests=50, seed=2, chunk_tokens=32)


@pytest.mark.parametrize(("page", "capacity"), [(1, 8), (4, 20), (4, 256), (16, 384), (64, 260), (64, 512), (64, 2048)])
def test_every_pool_gets_jobs_that_fit(page: int, capacity: int) -> None:
    assert_jobs_are_sound(synthetic_jobs(page, capacity, requests=80, seed=5, chunk_tokens=10 * page), capacity)


def test_synthetic_jobs_refuse_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="at least 260 tokens for pages of 64, got 256"):
        synthetic_jobs(64, 256, requests=1, seed=0, chunk_tokens=64)
    with pytest.raises(UsageError, match="of at least 1, got 4, 0 and 1"):
        synthetic_jobs(4, 256, requests=1, seed=0, chunk_tokens=0)


def test_the_trace_of_a_name_is_a_file_or_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace(tmp_path / "sample", line(), line())
    assert len(trace_rows("./sample", None)) == 2 and trace_rows("./sample", 1) == trace_rows("./sample", None)[:1]
    assert len(trace_rows("sample", 3)) == 3
