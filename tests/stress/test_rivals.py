"""Rivals share with their request exactly the pages that they say, and part from it at every kind of place."""

from __future__ import annotations

from collections import Counter

import pytest

from kvcheck.core.cache.hicache.storage import chain_hashes
from kvcheck.core.stress.scenarios.rivals import rivals_of
from kvcheck.core.stress.workload.decoder import prompt_tokens
from kvcheck.core.stress.workload.jobs import Job, session_jobs, token_authors

PAGES = 12
COUNT = 24


def names(job: Job, page: int, tokens: int) -> list[str]:
    prompt = prompt_tokens(job)[:tokens]
    return [
        each.hex()
        for each in chain_hashes([prompt[i * page : (i + 1) * page].tobytes() for i in range(tokens // page)])
    ]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("page", [16, 64])
def test_rivals_share_what_they_say_and_fit_the_pool(page: int, seed: int) -> None:
    jobs = session_jobs(page, PAGES * page, requests=36, sessions=9, seed=seed)
    rivals = rivals_of(jobs, page, PAGES * page, count=COUNT, seed=seed)
    assert [each.job.request for each in rivals] == list(range(37, 37 + COUNT))
    for each in rivals:
        of = jobs[each.of - 1]
        assert each.job.total_tokens <= PAGES * page // 2 and each.job.arrival == jobs[-1].arrival
        assert list(each.chain) == names(of, page, of.prompt_tokens)
        mine = names(each.job, page, each.job.prompt_tokens - 1)
        common = [mine[at] for at in range(min(len(mine), len(each.chain))) if mine[at] == each.chain[at]]
        assert len(common) == each.shared
    assert rivals == rivals_of(jobs, page, PAGES * page, count=COUNT, seed=seed)


def test_they_part_inside_a_page_at_its_end_and_one_token_beside_it() -> None:
    page = 16
    jobs = session_jobs(page, PAGES * page, requests=36, sessions=9, seed=1)
    parts: Counter[int] = Counter()
    for each in rivals_of(jobs, page, PAGES * page, count=60, seed=1):
        theirs = token_authors(jobs[each.of - 1])
        mine = token_authors(each.job)
        same = next(at for at in range(len(mine)) if at == len(theirs) or mine[at] != theirs[at])
        parts[same % page] += 1
    assert {0, 1, page - 1, page // 2} <= set(parts)
