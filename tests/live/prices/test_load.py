"""What a pass sends: equal lengths with and without shared beginnings, other tokens in each pass, a flood."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from rigs.live_client import ALPHABET, PARAMETERS

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.exchange import Question
from kvcheck.core.live.prices.load import FRESH, RETURNING, SHARED, ServingLoad, draw
from kvcheck.core.live.questions import Questions

LOAD = ServingLoad(kind=SHARED, requests=16, concurrency=4, prompt=160, answer=12, seed=3)
FEW = 6
"""Tokens that two requests begin with by chance at most: the header, and a few of 1,024 nodes."""


def waves(load: ServingLoad, *, number: int = 1, names: int = 7) -> list[list[Question]]:
    questions = Questions(ALPHABET, longest=PARAMETERS.length, names=names)
    return [[order.question for order in wave.orders] for wave in draw(load, questions, number).waves]


def alike(one: Question, other: Question) -> int:
    """Tokens that both begin with."""
    return next((i for i, pair in enumerate(zip(one.ids, other.ids, strict=False)) if pair[0] != pair[1]), len(one.ids))


def sizes(load: ServingLoad, **changes: int) -> list[list[tuple[int, int]]]:
    return [[(len(each.ids), len(each.expected)) for each in wave] for wave in waves(load, **changes)]


def test_both_loads_have_the_same_waves_and_lengths() -> None:
    fresh = replace(LOAD, kind=FRESH)
    assert sizes(LOAD) == sizes(fresh) and len(sizes(LOAD)) == 2
    assert sizes(LOAD, number=2) == sizes(fresh, number=2)
    walks = [size for size in sizes(LOAD)[-1] if size[0] > 100]
    assert all(abs(prompt - LOAD.prompt) <= 2 and answer == LOAD.answer for prompt, answer in walks)


def test_other_names_are_the_same_lengths_in_other_tokens() -> None:
    assert sizes(LOAD, names=7) == sizes(LOAD, names=8)
    one, other = waves(LOAD, names=7), waves(LOAD, names=8)
    # a test of positions has 16 values for a token, so two of them may begin alike for longer
    found = [
        alike(a, b) for wave in zip(one, other, strict=True) for a, b in zip(*wave, strict=True) if len(a.ids) > 100
    ]
    assert max(found) <= FEW


def test_requests_of_a_group_begin_as_its_warm_prompt_does() -> None:
    warm, timed = waves(LOAD)
    groups = LOAD.requests // 4
    for at, each in enumerate(timed):
        if at % 8 == 7:
            assert alike(each, warm[groups]) > len(each.ids) // 2  # a position test
        else:
            assert alike(each, warm[at % groups]) >= LOAD.prompt * 3 // 4 - 4
            assert each.ids != warm[at % groups].ids


def test_without_reuse_no_two_requests_begin_alike() -> None:
    walks = [each for wave in waves(replace(LOAD, kind=FRESH)) for each in wave if len(each.ids) > 100]
    assert max(alike(one, other) for one, other in combinations(walks, 2)) <= FEW


def test_a_flood_needs_more_than_the_pool_between_the_two_waves() -> None:
    load = replace(LOAD, kind=RETURNING, pool=2000)
    warm, flood, timed = waves(load)
    assert sum(len(each.ids) + len(each.expected) for each in flood) > 2000
    assert max(alike(one, other) for one in flood for other in (*warm, *timed)) <= FEW
    assert [(len(each.ids), len(each.expected)) for each in timed] == sizes(LOAD)[-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "mixed"}, "expected one of shared, fresh, returning, got 'mixed'"),
        ({"prompt": 8}, "--prompt: expected at least"),
        ({"answer": 1}, "the first one is timed alone"),
        ({"kind": RETURNING}, "how many tokens its pool holds"),
        ({"kind": RETURNING, "pool": 10**9}, "expected at most 2,000"),
    ],
)
def test_a_load_that_says_nothing_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(LOAD, **changes)  # type: ignore[arg-type]


def test_a_load_that_does_not_fit_is_refused() -> None:
    LOAD.check(PARAMETERS, 172)
    with pytest.raises(UsageError, match="expected at most 171 tokens together"):
        LOAD.check(PARAMETERS, 171)
    with pytest.raises(UsageError, match="as this model has nodes"):
        replace(LOAD, prompt=1500).check(PARAMETERS, 2048)
