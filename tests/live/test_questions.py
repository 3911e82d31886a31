"""Questions: drawn from seeds, asked under other names, and long enough to read every page."""

from __future__ import annotations

from math import gcd

import pytest
from rigs.live_client import ALPHABET, PARAMETERS

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.questions import Questions
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import Sizes
from kvcheck.core.model.answers import answers, reads

SIZES = Sizes(requests=18, concurrency=4, longest=1024, pool=1600)


def questions(names: int = 7, longest: int = 1024) -> Questions:
    return Questions(ALPHABET, longest=longest, names=names)


@pytest.mark.parametrize("name", LIVE_SCENARIOS.names())
@pytest.mark.parametrize(("longest", "pool"), [(80, None), (300, 400), (1024, 1600), (2048, 100_000)])
def test_every_question_of_a_scenario_has_its_one_right_answer(name: str, longest: int, pool: int | None) -> None:
    sizes = Sizes(requests=18, concurrency=4, longest=longest, pool=pool)
    round_ = LIVE_SCENARIOS.load(name).draw(questions(longest=longest), Rng(3), sizes)
    numbers = [order.question.number for order in round_.orders]
    assert list(dict.fromkeys(numbers)) == sorted(set(numbers)) and len(set(numbers)) >= 12
    for question in (order.question for order in round_.orders):
        assert question.expected == answers(ALPHABET, question.ids, len(question.expected))
        assert len(question.ids) + len(question.expected) <= longest
    assert all(wave.orders and wave.concurrency >= 1 for wave in round_.waves)


def drawn(name: str, *, seed: int = 5, names: int = 7) -> list[tuple[int, ...]]:
    """The prompts of a round."""
    round_ = LIVE_SCENARIOS.load(name).draw(questions(names), Rng(seed), SIZES)
    return [order.question.ids for order in round_.orders]


@pytest.mark.parametrize("name", LIVE_SCENARIOS.names())
def test_equal_seeds_draw_equal_rounds_and_other_names_the_same_in_other_words(name: str) -> None:
    ids, again, renamed = drawn(name), drawn(name), drawn(name, names=8)
    assert ids == again != drawn(name, seed=6)
    assert [len(each) for each in ids] == [len(each) for each in renamed] and not {*ids} & {*renamed}
    assert shared(ids) == shared(renamed)


def shared(ids: list[tuple[int, ...]]) -> list[int]:
    """How far each two begin alike; the header counts as nothing."""
    return [max(_common(one, two), 3) for number, one in enumerate(ids) for two in ids[:number]]


def _common(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.parametrize("places", [24, 61, 100, 257])
def test_an_answer_that_covers_a_walk_reads_every_page_in_every_layer(places: int) -> None:
    asked = questions()
    rng = Rng(places)
    subject = asked.walk(rng, places)
    assert gcd(len(subject.values), PARAMETERS.hops) == 1
    question = asked.put(rng, subject, asked.cover(subject))
    listed = range(2, 2 + len(subject.values))
    for layer in range(1, PARAMETERS.layers):
        read = {each.positions[layer] // 16 for each in reads(ALPHABET, question.ids, len(question.expected))}
        assert read >= {position // 16 for position in listed if position // 16 not in (0, listed[-1] // 16)}


def test_a_next_turn_begins_with_the_whole_turn_before() -> None:
    asked, rng = questions(), Rng(1)
    first = asked.put(rng, asked.walk(rng, 60), 20)
    second = asked.again(rng, first, 12)
    assert second.ids[: len(first.ids) + 20] == first.ids + first.expected
    assert second.expected == answers(ALPHABET, second.ids, 12)


def test_a_cut_is_a_shared_prefix() -> None:
    asked, rng = questions(), Rng(2)
    walk, marks = asked.walk(rng, 90), asked.marks(rng)
    for subject, other, cut in (
        (walk, asked.walk(rng, 120, prefix=walk.cut(57)), 57),
        (marks, asked.marks(rng, prefix=marks.cut(33)), 33),
    ):
        one, two = asked.put(rng, subject, 4), asked.put(rng, other, 4)
        assert cut + 2 <= _common(one.ids, two.ids) < cut + 8


def test_an_answer_to_a_position_test_reads_all_marks_but_the_first_few() -> None:
    asked, rng = questions(), Rng(4)
    for _ in range(20):
        subject = asked.marks(rng)
        question = asked.put(rng, subject, asked.cover(subject))
        read = {each.positions[0] for each in reads(ALPHABET, question.ids, len(question.expected))}
        assert read >= set(range(len(question.ids) - 1 - PARAMETERS.distance, len(question.ids)))
        assert len(subject.values) - PARAMETERS.distance <= 8


def test_a_server_that_takes_too_few_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="takes 20"):
        questions(longest=20)


def test_prefix_cache_asks_one_request_twice_and_others_by_an_equal_last_token() -> None:
    round_ = LIVE_SCENARIOS.load("prefix-cache").draw(questions(), Rng(3), SIZES)
    assert len(round_.orders) > len({order.question.ids for order in round_.orders})
    answered: dict[int, set[tuple[int, ...]]] = {}
    for order in round_.orders:
        answered.setdefault(order.question.ids[-1], set()).add(order.question.expected)
    assert any(len(each) > 1 for each in answered.values())


def test_a_flood_needs_more_than_the_pool() -> None:
    round_ = LIVE_SCENARIOS.load("hicache").draw(questions(), Rng(3), SIZES)
    first, flood, back = round_.waves
    assert sum(len(order.question.ids) for order in flood.orders) > 1600
    assert len(first.orders) == len(back.orders)
    assert all(
        _common(one.question.ids, two.question.ids) > 60 for one, two in zip(first.orders, back.orders, strict=True)
    )


def test_position_tests_of_one_seed_under_other_names_have_other_beginnings() -> None:
    asked = [questions(names) for names in range(600)]
    assert len({each.put(Rng(3), each.marks(Rng(3)), 8).ids[2:34] for each in asked}) == 600
