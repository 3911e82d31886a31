"""The three numbers of a wave, from answers that are written out."""

from __future__ import annotations

import pytest
from rigs.live_client import exchange

from kvcheck.core.base.server_facts import FIRST_TOKEN, NEXT_TOKEN, THROUGHPUT
from kvcheck.core.live.exchange import End, Exchange, Question
from kvcheck.core.live.prices.rounds import METRICS, Times, times_of

QUESTION = Question(number=0, ids=(1,) * 40, expected=(5, 6, 7, 8, 9))


def answered(began_s: float, first_s: float | None, last_s: float | None, **changes: object) -> Exchange:
    fields: dict[str, object] = {"first_s": first_s, "last_s": last_s, "first_tokens": 1, "cached": 16, **changes}
    return exchange(QUESTION, began_s=began_s, ended_s=(last_s or began_s) + 0.5, **fields)


WAVE = [answered(10.0, 10.2, 11.0), answered(10.1, 10.5, 10.9), answered(10.9, 11.2, 12.0, first_tokens=3)]


def numbers(times: Times | None) -> dict[str, float | None]:
    assert times is not None
    return {case: None if (us := METRICS[case](times)) is None else round(us, 3) for case in METRICS}


def test_the_numbers_of_a_wave() -> None:
    # 15 tokens from 10.0 to 12.0; first tokens after 0.2, 0.4 and 0.3 s; later ones in 0.8/4, 0.4/4 and 0.8/2 s
    times = times_of(WAVE, 3)
    assert numbers(times) == {THROUGHPUT: pytest.approx(2e6 / 15, abs=0.01), FIRST_TOKEN: 3e5, NEXT_TOKEN: 2e5}
    assert times is not None and (times.tokens, times.prompt, times.cached_share) == (15, 120, 0.4)


def test_two_waves_together_count_each_request_once() -> None:
    first, second = times_of(WAVE[:2], 2), times_of(WAVE[2:], 1)
    assert first is not None and second is not None
    both = first.plus(second)
    assert both.span_s == pytest.approx(1.0 + 1.1) and both.tokens == 15
    assert numbers(both)[FIRST_TOKEN] == 3e5 and both.cached_share == 0.4


@pytest.mark.parametrize(
    ("wave", "wanted"),
    [
        ([], 0),
        (WAVE, 4),
        ([*WAVE, answered(11.0, 11.1, 11.2, tokens=(5, 6))], 4),
        ([*WAVE, answered(11.0, None, None, end=End.REFUSED, tokens=())], 4),
    ],
    ids=["nothing", "not all were sent", "one ended early", "one was refused"],
)
def test_a_wave_that_is_not_whole_has_no_times(wave: list[Exchange], wanted: int) -> None:
    assert times_of(wave, wanted) is None


WHOLE = answered(10.0, 11.0, 11.0, first_tokens=5)


def test_a_server_that_sends_answers_in_one_piece_says_nothing_of_its_first_token() -> None:
    times = times_of([WAVE[0], WHOLE, WHOLE], 3)
    told = numbers(times)
    assert told[THROUGHPUT] is not None and told[FIRST_TOKEN] is None and told[NEXT_TOKEN] is None
    streamed = times_of(WAVE, 3)
    assert times is not None and streamed is not None
    assert numbers(streamed.plus(times))[FIRST_TOKEN] is numbers(times.plus(streamed))[NEXT_TOKEN] is None


def test_one_answer_in_one_piece_among_others_has_its_first_token_and_no_next_one() -> None:
    times = times_of([*WAVE, WHOLE], 4)
    assert times is not None and len(times.first_s) == 4 and len(times.next_s) == 3


def test_cached_tokens_that_one_answer_does_not_say_are_not_known() -> None:
    times = times_of([*WAVE, answered(11.0, 11.1, 11.2, cached=None)], 4)
    assert times is not None and times.cached_share is None
