"""Sessions: requests that come back with what they had before, in a pool that cannot hold them all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.stress.workload.jobs import Job, session_jobs, token_authors


def prompt(job: Job) -> list[int]:
    """The author of each prompt position."""
    return token_authors(job)[: job.prompt_tokens].tolist()


def shared(job: Job, other: Job) -> int:
    """Leading positions that two prompts have in common."""
    pairs = zip(prompt(job), prompt(other), strict=False)
    return next(
        (at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(job.prompt_tokens, other.prompt_tokens)
    )


SETTINGS = st.tuples(st.sampled_from([1, 2, 4, 8, 64]), st.integers(6, 40), st.integers(1, 6), st.integers(0, 2**32))


@given(SETTINGS)
def test_every_job_fits_half_the_pool_and_brings_at_most_two_pages(settings: tuple[int, int, int, int]) -> None:
    page, pages, sessions, seed = settings
    jobs = session_jobs(page, page * pages, requests=40, sessions=sessions, seed=seed)
    assert [job.request for job in jobs] == [*range(1, 41)]
    assert [job.arrival for job in jobs] == [request // 2 for request in range(1, 41)]
    for at, job in enumerate(jobs):
        assert job.total_tokens <= page * pages // 2
        assert 0 <= job.own_prompt_tokens <= 2 * page
        assert 1 <= job.output_tokens <= 2 * page
        assert prompt(job)[-1] == job.request or not job.own_prompt_tokens
        authors = {author for author in prompt(job) if author != job.request}
        kept = job.prompt_tokens - job.own_prompt_tokens
        assert prompt(job)[:kept].count(job.request) == 0
        # All that is kept is the beginning of one earlier prompt: no request is mixed from two of them.
        assert not authors or max(shared(job, before) for before in jobs[:at]) >= kept


@given(SETTINGS)
def test_jobs_are_a_function_of_the_arguments(settings: tuple[int, int, int, int]) -> None:
    page, pages, sessions, seed = settings
    make = [
        session_jobs(page, page * pages, requests=12, sessions=sessions, seed=each) for each in (seed, seed, seed + 1)
    ]
    assert make[0] == make[1] != make[2]


def test_at_most_so_many_prompts_start_anew_and_a_single_session_always_comes_back() -> None:
    for sessions in (1, 3, 6):
        jobs = session_jobs(8, 8 * 40, requests=60, sessions=sessions, seed=3)
        fresh = [job for job in jobs if job.own_prompt_tokens == job.prompt_tokens]
        assert 1 <= len(fresh) <= sessions
    jobs = session_jobs(8, 8 * 400, requests=20, sessions=1, seed=3)
    for before, job in pairwise(jobs):
        assert shared(job, before) >= min(8, before.prompt_tokens)


def test_prompts_are_kept_whole_cut_to_pages_and_cut_inside_a_page_and_some_repeat_what_was_served() -> None:
    page = 8
    jobs = session_jobs(page, page * 400, requests=60, sessions=1, seed=1)
    cuts = [(shared(job, before), before.prompt_tokens) for before, job in pairwise(jobs)]
    assert any(kept == whole for kept, whole in cuts)
    assert {kept % page == 0 for kept, whole in cuts if kept < whole} == {True, False}
    repeats = [job for job in jobs if not job.own_prompt_tokens]
    assert 3 <= len(repeats) <= 20
    assert {bool(job.prompt_tokens % page) for job in repeats} == {False, True}
    assert all(any(shared(job, before) == job.prompt_tokens for before in jobs[: job.request - 1]) for job in repeats)


def test_some_prompts_share_a_part_of_what_the_prompt_beside_them_continues() -> None:
    page = 8
    jobs = session_jobs(page, page * 400, requests=60, sessions=6, seed=1)
    arriving = [(jobs[at], jobs[at + 1]) for at in range(1, len(jobs) - 1, 2)]
    assert all(one.arrival == other.arrival for one, other in arriving)
    parts = [(shared(*each), each[0].prompt_tokens) for each in arriving]
    split = [kept for kept, whole in parts if page <= kept < whole and kept % page == 0]
    assert len(split) >= 3


def test_the_working_set_is_larger_than_the_pool_and_sessions_take_turns() -> None:
    page, pages = 8, 10
    jobs = session_jobs(page, page * pages, requests=60, sessions=6, seed=1)
    assert len({(author, at) for job in jobs for at, author in enumerate(prompt(job))}) > page * pages
    counts: dict[int, int] = {}
    for job in jobs:  # a session is known by the request that opened it
        counts[prompt(job)[0]] = counts.get(prompt(job)[0], 0) + 1
    assert len(counts) == 6 and min(counts.values()) >= 5
    turns = [prompt(job)[0] for job in jobs]
    others = [len({*turns[at + 1 : at + 6]} - {turns[at]}) for at in range(len(turns) - 6)]
    assert sum(each >= 3 for each in others) > len(others) // 2  # the others come in between


def test_optional_fields_are_all_wanted_by_some_and_hidden_states_only_with_speculation() -> None:
    jobs = session_jobs(8, 400, requests=80, sessions=6, seed=2)
    for field in ("wants_logprobs", "speculative", "wants_hidden"):
        assert {getattr(job, field) for job in jobs} == {True, False}
    assert all(job.speculative for job in jobs if job.wants_hidden)


@pytest.mark.parametrize(("capacity", "requests", "sessions"), [(47, 4, 2), (0, 4, 2), (80, 0, 2), (80, 4, 0)])
def test_what_cannot_be_made_is_refused(capacity: int, requests: int, sessions: int) -> None:
    with pytest.raises(
        UsageError, match=f"at least 6 pages of 8 tokens.*got {capacity} tokens, {requests} and {sessions}"
    ):
        session_jobs(8, capacity, requests=requests, sessions=sessions, seed=1)


@pytest.mark.parametrize("page", [4, 8, 64])
def test_half_of_the_prompts_end_with_a_page_or_one_token_beside_its_end(page: int) -> None:
    jobs = session_jobs(page, page * 40, requests=600, sessions=9, seed=3)
    beside = [job for job in jobs if min(job.prompt_tokens % page, -job.prompt_tokens % page) <= 1]
    assert 0.4 * len(jobs) < len(beside) and {job.prompt_tokens % page for job in beside} == {0, 1, page - 1}
    assert len({job.prompt_tokens % page for job in jobs}) > 0.9 * page, "and the others end anywhere"
