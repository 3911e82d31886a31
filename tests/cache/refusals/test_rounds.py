"""Rounds of a scheduler at the edge: who is let in, who has to wait, who comes back, and what an abort ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rigs.rounds import FIRST, SECOND, THIRD, BareCache, deps, request
from rigs.scene import LONGEST, PAGES, ROWS, pool_of

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.cache.scheduler.request import SchedulerConfig
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.stress.workload.shapes import shape

NAMES = ("llama-3-tiny", "gpt-oss-tiny", "qwen3-next-tiny", "llama-3-micro")
ENOUGH = 12
"""Rounds in which two requests of a few tokens are served."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scheduler_of(
    name: str, *prompts: int, outputs: int = 1, cache: BareCache | None = None, pages: int = PAGES, **settings: int
) -> Scheduler:
    sizes = {"window_pages": pages} if shape(name).window_layers else {}
    made = Scheduler(
        deps(pool_of(name, pages=pages, **sizes), cache),
        SchedulerConfig(**({"max_running": 1} | settings)),  # type: ignore[arg-type]
    )
    for number, tokens in enumerate(prompts, FIRST):
        made.submit(request(number, tokens, outputs=outputs))
    return made


@pytest.mark.parametrize("pages", [PAGES, LONGEST - 1])
def test_a_request_that_can_never_fit_is_refused(name: str, pages: int) -> None:
    most = min(pages, LONGEST) * shape(name).page_size
    assert not scheduler_of(name, most - 1, pages=pages).is_idle
    with pytest.raises(LengthMismatch):
        scheduler_of(name, most, pages=pages)


def test_no_more_prompts_are_prefilled_together_than_may_be(name: str) -> None:
    assert scheduler_of(name, 1, 1, 1, max_prefilling=2).step().admitted == [FIRST, SECOND]


def test_no_more_requests_run_together_than_may(name: str) -> None:
    assert scheduler_of(name, 1, 1, outputs=3).step().joined == [FIRST]


def test_as_many_requests_are_let_in_as_there_are_rows(name: str) -> None:
    scheduler = scheduler_of(name, *[1] * (ROWS + 1), max_prefilling=ROWS + 1)
    assert scheduler.step().admitted == [*range(FIRST, FIRST + ROWS)]


def test_prompts_fill_the_last_page_and_no_more(name: str) -> None:
    """With their first tokens, two prompts fill three pages each, and one the seventh."""
    size = shape(name).page_size
    longest = 3 * size - 1
    assert PAGES == 7
    assert scheduler_of(name, longest, longest, size - 1).step().admitted == [FIRST, SECOND, THIRD]
    assert scheduler_of(name, longest, longest, size).step().admitted == [FIRST, SECOND]


def test_a_request_that_waits_is_ended_at_once_and_once(name: str) -> None:
    scheduler = scheduler_of(name, 1)
    assert not scheduler.abort(SECOND)
    assert scheduler.abort(FIRST) and scheduler.is_idle and not scheduler.abort(FIRST)


def test_a_retracted_request_comes_back_beside_one_that_runs(name: str) -> None:
    scheduler = scheduler_of(name, 1, 1, outputs=4, max_running=2)
    scheduler.step()
    assert scheduler.preempt(FIRST) and scheduler.step().resumed == [FIRST]


def test_a_retracted_request_comes_back_when_its_place_is_free(name: str) -> None:
    scheduler = scheduler_of(name, 1, 1, outputs=5, resume_delay=2)
    scheduler.step()
    assert scheduler.preempt(FIRST)
    events: list[str] = []
    for report in (scheduler.step() for _ in range(ENOUGH)):
        events += [f"{number} resumed" for number in report.resumed]
        events += [f"{number} ended" for number, _ in report.finished]
    assert events == [f"{SECOND} ended", f"{FIRST} resumed", f"{FIRST} ended"] and scheduler.is_idle


# Beside a cache


def test_pages_are_fetched_for_no_more_than_may_be_prefilled(name: str) -> None:
    cache = BareCache(shape(name).page_size, fetching=(FIRST, SECOND, THIRD))
    scheduler_of(name, 1, 1, 1, cache=cache, max_prefilling=2).step()
    assert {number for number, _ in cache.fetched} == {FIRST, SECOND}


def test_prompts_go_past_one_whose_pages_are_on_their_way_and_it_keeps_its_place(name: str) -> None:
    cache = BareCache(shape(name).page_size, fetching=(FIRST,))
    scheduler = scheduler_of(name, 1, 1, 1, 1, cache=cache, max_prefilling=2)
    assert scheduler.step().admitted == [SECOND, THIRD] and scheduler.states()[FIRST] == "fetching"
    cache.fetching.clear()
    assert scheduler.step().admitted[0] == FIRST


def test_urgent_requests_go_first_and_wait_for_no_store(name: str) -> None:
    cache = BareCache(shape(name).page_size, fetching=(FIRST, SECOND, THIRD))
    scheduler = scheduler_of(name, 1, cache=cache, max_prefilling=2)
    for number in (SECOND, THIRD):
        scheduler.submit(replace(request(number, 1), is_urgent=True))
    assert [*scheduler.states()] == [SECOND, THIRD, FIRST]
    assert scheduler.step().admitted == [SECOND, THIRD] and cache.fetched == []


def test_the_prompt_that_has_a_part_loaded_is_reported(name: str) -> None:
    cache = BareCache(shape(name).page_size, loading=(SECOND,))
    report = scheduler_of(name, 1, 1, cache=cache, max_prefilling=2).step()
    assert (report.admitted, report.loading) == ([FIRST, SECOND], [SECOND])


def test_the_last_token_of_a_prompt_is_computed_and_all_pages_before_it_are_looked_for(name: str) -> None:
    size = shape(name).page_size
    cache = BareCache(size)
    scheduler_of(name, 2 * size + 1, cache=cache, chunk_tokens=size).step()
    assert cache.fetched == cache.admitted == [(FIRST, 2 * size)]


def test_a_prompt_of_whole_pages_is_offered_to_the_tree_before_its_request_ends(name: str) -> None:
    size = shape(name).page_size
    cache = BareCache(size)
    prompt = 2 * size if size > 2 else size  # three more tokens have to fit into LONGEST pages
    scheduler = scheduler_of(name, prompt, outputs=3, cache=cache, chunk_tokens=2 * size)
    scheduler.step()
    assert not scheduler.is_idle and cache.kept == [prompt]
