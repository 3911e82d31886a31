"""How far two answers lie apart, and the runs of tokens that only one request may know."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Answer, End, Question
from kvcheck.core.live.own.deviation import Deviation, deviation
from kvcheck.core.live.own.needles import Needles, recites, shortest_run
from kvcheck.core.live.own.prompts import BLOCK, CODE, FILLING, FRAME, OwnQuestions, ids_of


def answer(tokens: tuple[int, ...], logprobs: tuple[float, ...], *top: Mapping[int, float]) -> Answer:
    return Answer(end=End.DONE, tokens=tokens, logprobs=logprobs, top=top or None)


def far(one: Answer, two: Answer) -> float:
    found = deviation(one, two)
    assert found is not None
    return found.largest


def test_the_largest_difference_of_all_listed_tokens_counts() -> None:
    one = answer((1, 2), (-0.25, -1.5), {1: -0.25, 5: -2.0}, {2: -1.5, 6: -1.75})
    two = answer((1, 2), (-0.3, -1.5), {1: -0.3, 5: -2.0}, {2: -1.5, 6: -1.5})
    found = deviation(one, two)
    assert found is not None and (found.largest, found.step) == (0.25, 1)
    assert deviation(one, one) == Deviation(largest=0.0, step=0, flip=None, tokens=2)


def test_nothing_is_compared_after_the_first_other_token() -> None:
    one, two = answer((1, 2, 3), (-0.5, -0.5, -9.0)), answer((1, 4, 3), (-0.5, -0.75, -0.5))
    found = deviation(one, two)
    assert found is not None and (found.flip, found.tokens) == (1, 2) and found.largest < 1.0


def test_a_sure_token_that_flips_is_a_large_difference() -> None:
    tie = math.log(0.5)
    assert far(answer((1,), (tie,)), answer((2,), (tie,))) == pytest.approx(0.0)
    one, two = answer((1,), (math.log(0.99),)), answer((2,), (math.log(0.98),))
    assert far(one, two) == pytest.approx(math.log(0.98 / 0.01)), "the second token has at most 1 % in the first answer"
    assert math.isfinite(far(answer((1,), (0.0,)), answer((2,), (0.0,))))


def test_a_token_that_a_list_lacks_is_below_the_least_of_it() -> None:
    one = answer((1,), (-0.1,), {1: -0.1, 5: -3.0, 6: -5.0})
    two = answer((9,), (-0.4,), {9: -0.4, 5: -3.0, 7: -3.5})
    assert far(one, two) == pytest.approx(5.0 - 0.4), "token 9 has at most exp(-5) in the first answer"


def test_what_cannot_be_compared_is_none() -> None:
    one = answer((1,), (-0.1,))
    assert deviation(one, Answer(end=End.DONE, tokens=(1,))) is None
    assert deviation(one, answer((), ())) is None


IDS = ids_of(1000)


def source(names: int = 1, **options: object) -> OwnQuestions:
    return OwnQuestions(IDS, longest=512, names=names, **options)  # type: ignore[arg-type]


def test_a_prompt_asks_for_a_code_of_its_own() -> None:
    here = source()
    question = here.put(Rng(1), here.walk(Rng(2), 100), 32)
    code = here.code_asked(question)
    assert len(code) == CODE and question.ids[-FRAME:] in [
        question.ids[at : at + FRAME] for at in range(FILLING, len(question.ids) - FRAME, BLOCK)
    ]
    at = next(at for at in range(len(question.ids)) if question.ids[at : at + CODE] == code)
    assert question.ids[at - FRAME : at] == question.ids[-FRAME:]


def test_prompts_that_share_nothing_share_no_page_of_one_token() -> None:
    """Its noise would be the noise of all of them. See `page_groups`."""
    here = source()
    begins = [here.walk(Rng(number), 60).values[0] for number in range(60)]
    assert len({*begins}) > 50, "two may begin alike by chance"
    question = here.put(Rng(1), here.walk(Rng(2), 60), 32)
    runs = here.drawn(question.number)
    assert sum(map(len, runs)) == 60 - 4 * FRAME, "all but four openers and markers"
    assert all(question.ids[6:7] not in (run[at : at + 1] for at in range(len(run))) for run in runs), "no opener"


def test_the_next_turn_repeats_what_the_server_answered() -> None:
    here = source()
    first = here.put(Rng(1), here.walk(Rng(2), 60), 4)
    here.again(Rng(3), first, 8)
    assert [*here.wanted] == [first.number], "its answer is not known yet"
    knows = source(answers={first.number: (11, 12, 13)})
    knows.put(Rng(1), knows.walk(Rng(2), 60), 4)
    turn = knows.again(Rng(3), first, 8)
    assert turn.ids[: len(first.ids) + 3] == (*first.ids, 11, 12, 13) and not knows.wanted


@pytest.mark.parametrize("vocabulary", [255, 0, -1])
def test_a_vocabulary_that_is_too_small_is_refused(vocabulary: int) -> None:
    with pytest.raises(UsageError, match="--vocabulary"):
        ids_of(vocabulary)


def needles(length: int = 4) -> Needles:
    return Needles(length=length, drawn=600)


def question(number: int, *ids: int) -> Question:
    return Question(number=number, ids=ids, expected=(0,) * 8)


MINE, OTHER = (1, 2, 3, 4, 5, 6), (11, 12, 13, 14, 15, 16)


def both() -> Needles:
    found = needles()
    found.add(question(0, *MINE), [MINE])
    found.add(question(1, *OTHER), [OTHER])
    return found


def test_a_run_of_another_request_is_crosstalk_with_its_owner() -> None:
    found = both().crosstalk(question(0, *MINE), (1, 2, 12, 13, 14, 15, 16, 9))
    assert found is not None and (found.step, found.run, found.owners) == (2, (12, 13, 14, 15, 16), (1,))


@pytest.mark.parametrize("tokens", [(1, 2, 3, 4, 5, 6), (11, 12, 13, 1, 2), (11, 12, 14, 13, 15), ()])
def test_own_runs_and_short_runs_are_none(tokens: tuple[int, ...]) -> None:
    assert both().crosstalk(question(0, *MINE), tokens) is None


def test_a_run_that_a_shared_prefix_holds_is_everybodys() -> None:
    found = both()
    shares = question(2, *OTHER, 7, 8)
    found.add(shares, [(*OTHER, 7, 8)])
    assert found.crosstalk(question(1, *OTHER), OTHER) is None
    assert found.crosstalk(shares, OTHER) is None
    asked = question(3, 99, *OTHER, 98)  # a next turn, whose run is in no table under its number
    assert found.crosstalk(asked, OTHER) is None


def test_the_shortest_run_makes_a_chance_that_is_told() -> None:
    length = shortest_run(635, prompt_tokens=30_000, answer_tokens=20_000)
    assert (2 / 635) ** length * 6e8 <= 1e-9 < (2 / 635) ** (length - 1) * 6e8
    found = needles(length)
    found.add(question(0), [tuple(range(length + 3))])
    found.crosstalk(question(1), tuple(range(100, 100 + length + 1)))
    assert found.chance == pytest.approx(4 * 2 * (2 / 600) ** length)


def test_an_answer_recites_the_code_it_was_asked_for() -> None:
    assert recites((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 9), 5)
    assert not recites((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9), 5)
