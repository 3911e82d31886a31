"""Cached counts that can be and that cannot: by page, own tokens, rounds, earlier runs and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.live_answers import SETTING, codes, exchange, judged, walk_question

from kvcheck.core.live.exchange import End, Question
from kvcheck.core.live.judge import longest_shared, packed

SHARED = list(range(50))
FIRST = walk_question(1, [*SHARED, *range(60, 71)])
SECOND = walk_question(2, [*SHARED, *range(80, 91)])
ALIKE = 52  # the header and the shared places
ROUNDED = 64


def alike(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


@pytest.mark.parametrize("cached, expected", [(0, []), (52, []), (ROUNDED, []), (ROUNDED + 1, ["KV805"])])
def test_no_more_than_what_was_sent_before_rounded_to_a_page(cached: int, expected: list[str]) -> None:
    assert alike(FIRST.ids, SECOND.ids) == ALIKE
    assert len(SECOND.ids) == ROUNDED + 1
    assert codes(judged(exchange(SECOND, cached=cached), before=[exchange(FIRST)])) == expected


def test_requests_of_one_round_count_for_each_other() -> None:
    assert codes(judged(exchange(FIRST, cached=ALIKE), exchange(SECOND, cached=ALIKE))) == []
    assert codes(judged(exchange(FIRST, cached=65), exchange(SECOND, cached=65))) == ["KV805", "KV805"]


@pytest.mark.parametrize("cached, expected", [(1, []), (16, []), (17, ["KV805"]), (40, ["KV805"])])
def test_a_first_request_has_its_header_at_most(cached: int, expected: list[str]) -> None:
    before = [exchange(walk_question(9, range(200, 231)))]
    assert codes(judged(exchange(FIRST, cached=cached), before=before)) == expected


@pytest.mark.parametrize("cached, expected", [(3, []), (4, []), (8, ["KV805"])])
def test_a_few_first_tokens_can_be_those_of_a_request_of_an_earlier_run(cached: int, expected: list[str]) -> None:
    setting = replace(SETTING, page=1)
    before = [exchange(walk_question(9, range(200, 231)))]
    assert codes(judged(exchange(FIRST, cached=cached), before=before, setting=setting)) == expected


def test_a_request_sent_again_can_be_cached_whole() -> None:
    again = exchange(FIRST, cached=len(FIRST.ids), rid="again")
    assert codes(judged(again, before=[exchange(FIRST)])) == []
    assert codes(judged(again, exchange(FIRST))) == []
    assert codes(judged(exchange(FIRST, cached=len(FIRST.ids)))) == ["KV805"]


def test_the_first_answer_is_a_prefix_of_the_second_turn() -> None:
    ids = (*FIRST.ids, *FIRST.expected, FIRST.ids[-1])
    turn = Question(number=3, ids=ids, expected=FIRST.expected)
    whole = len(FIRST.ids) + len(FIRST.expected)
    assert codes(judged(exchange(turn, cached=whole), before=[exchange(FIRST)])) == []
    stopped = exchange(FIRST, end=End.ABORTED, tokens=FIRST.expected[:1], finish=None)
    assert codes(judged(exchange(turn, cached=whole), before=[stopped])) == []  # it may have made more than came


@pytest.mark.parametrize(
    "changes",
    [{"retracts": True}, {"began_empty": False}, {"transfers": True}],
    ids=["retractions", "an earlier run", "a transfer"],
)
def test_where_more_can_be_cached_the_prompt_is_the_limit(changes: dict[str, bool]) -> None:
    setting = replace(SETTING, **changes)  # type: ignore[arg-type]
    whole = len(FIRST.ids)
    assert codes(judged(exchange(FIRST, cached=whole), setting=setting)) == []
    assert codes(judged(exchange(FIRST, cached=whole + 1), setting=setting)) == ["KV805"]


def test_an_engine_that_says_that_a_request_had_no_retraction_is_held_to_it() -> None:
    setting = replace(SETTING, retracts=True)
    assert codes(judged(exchange(FIRST, cached=60, retractions=0), setting=setting)) == ["KV805"]
    assert codes(judged(exchange(FIRST, cached=60, retractions=1), setting=setting)) == []


@pytest.mark.parametrize("cached, expected", [(32, []), (64, []), (65, ["KV805"])])
def test_own_chunks_of_an_engine_that_counts_them(cached: int, expected: list[str]) -> None:
    assert codes(judged(exchange(FIRST, cached=cached), setting=replace(SETTING, own_chunk=32))) == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12), st.lists(st.integers(0, 3), max_size=6))
def test_the_longest_shared_prefix_is_with_a_neighbour(rows: list[list[int]], request: list[int]) -> None:
    sequences = sorted(packed(row) for row in rows)
    longest = max((alike(row, request) for row in rows), default=0)
    assert longest_shared(packed(request), sequences) == longest
