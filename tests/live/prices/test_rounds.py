"""Prices of running servers: times of answers, loads, and rounds of both."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from rigs.live_client import ALPHABET, PARAMETERS, exchange

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow
from kvcheck.core.base.server_facts import FIRST_TOKEN, NEXT_TOKEN, THROUGHPUT
from kvcheck.core.live.exchange import End, Exchange, Question
from kvcheck.core.live.prices.load import FRESH, RETURNING, SHARED, ServingLoad, draw
from kvcheck.core.live.prices.rounds import CONTROL, METRICS, Compared, TimedRounds, Times, order_of_passes, times_of
from kvcheck.core.live.questions import Questions
from kvcheck.core.report.prices import ALIKE, TOO_FEW, has_price, verdict

COMPARED = Compared(arm="versus", baseline="target", size="4x96+8@4", shape="llama-4x2x64", device="sglang")
ARMS = ("target", CONTROL, "versus")
TOLD_APART = {"faster", "slower"}
QUESTION = Question(number=0, ids=(1,) * 40, expected=(5, 6, 7, 8, 9))
LOAD = ServingLoad(kind=SHARED, requests=16, concurrency=4, prompt=160, answer=12, seed=3)
FEW = 6
"""Tokens that two requests begin with by chance at most: the header, and a few of 1,024 nodes."""


def made(factor: float, rng: random.Random, noise: float, *, is_streamed: bool = True) -> Times:
    """A pass of four requests that takes so many times what others do."""

    def drawn(middle: float) -> tuple[float, ...]:
        return tuple(middle * factor * rng.lognormvariate(0.0, noise) for _ in range(4)) if is_streamed else ()

    return Times(span_s=factor, tokens=40, first_s=drawn(0.2), next_s=drawn(0.02), prompt=400, cached=100)


def simulated(
    seed: int, rounds: int, *, noise: float = 0.05, kept: float = 0.0, tail: float = 0.0, ratio: float = 1.0
) -> TimedRounds:
    """noise: of a pass. kept: how much of a disturbance is still there in the next pass. tail: the share of passes that
    take up to ten times as long. ratio: of the arm."""
    rng, found, state = random.Random(seed), TimedRounds(COMPARED), 0.0
    for number in range(1, rounds + 1):
        passes: dict[str, list[Times]] = {name: [] for name in ARMS}
        for name in order_of_passes(ARMS, seed=seed, number=number):
            state = kept * state + math.sqrt(1 - kept**2) * rng.gauss(0.0, noise)
            slow = rng.uniform(1.0, 10.0) if rng.random() < tail else 1.0
            passes[name].append(made(math.exp(state) * slow * (ratio if name == "versus" else 1.0), rng, noise))
        found.add(passes)
    return found


def told(rows: list[BenchRow]) -> set[str]:
    return {verdict(row, None) for row in rows}


def test_a_round_goes_there_and_back_in_a_drawn_order() -> None:
    orders = [order_of_passes(ARMS, seed=1, number=number) for number in range(60)]
    assert all(order == order[::-1] and sorted(order) == sorted(2 * ARMS) for order in orders)
    assert orders == [order_of_passes(ARMS, seed=1, number=number) for number in range(60)]
    assert set(Counter(order[0] for order in orders)) == set(ARMS) and len(set(orders)) == 6


def test_a_server_that_becomes_slower_costs_each_arm_as_much() -> None:
    rounds = TimedRounds(COMPARED)
    for number in range(8):
        passes: dict[str, list[Times]] = {name: [] for name in ARMS}
        for at, name in enumerate(order_of_passes(ARMS, seed=2, number=number)):
            passes[name].append(made(1.0 + 0.1 * at, random.Random(0), 0.0))
        rounds.add(passes)
    (row, *_) = rounds.rows()
    assert row.ratio.est == pytest.approx(1.0) and row.floor == pytest.approx(0.0)


@pytest.mark.parametrize("rounds", [7, 15, 40])
@pytest.mark.parametrize(("noise", "kept", "tail"), [(0.05, 0.0, 0.0), (0.3, 0.9, 0.05), (0.3, 0.99, 0.0)])
def test_equal_arms_are_told_apart_in_one_run_of_twenty(rounds: int, noise: float, kept: float, tail: float) -> None:
    runs = 120 if rounds < 40 else 40
    alarms = sum(
        bool(told(simulated(seed, rounds, noise=noise, kept=kept, tail=tail).rows()) & TOLD_APART)
        for seed in range(runs)
    )
    assert alarms <= runs / 20


def test_an_arm_that_takes_half_as_long_again_is_slower_by_so_much() -> None:
    right = 0
    for seed in range(20):
        rows = simulated(seed, 15, ratio=1.5).rows()
        assert told(rows) == {"slower"}
        right += all(
            row.ratio.lo is not None and row.ratio.hi is not None and row.ratio.lo <= 1.5 <= row.ratio.hi
            for row in rows
        )
    assert right >= 14  # three intervals of 95 % each, not independent
    assert told(simulated(1, 15, ratio=1 / 1.5).rows()) == {"faster"}


def test_a_difference_within_the_floor_is_not_told_apart() -> None:
    rows = simulated(1, 15, noise=0.2, ratio=1.05).rows()
    assert told(rows) == {ALIKE}
    assert all(row.status == "noisy" for row in rows)


def test_six_rounds_are_too_few_for_three_claims() -> None:
    assert told(simulated(1, 6, noise=0.0, ratio=2.0).rows()) == {ALIKE}
    assert told(simulated(1, 7, noise=0.0, ratio=2.0).rows()) == {"slower"}
    assert told(simulated(1, 7, noise=0.0, ratio=0.5).rows()) == {"faster"}


def test_fewer_than_six_rounds_have_no_price() -> None:
    rows = simulated(1, 5, ratio=3.0).rows()
    assert told(rows) == {TOO_FEW} and not any(map(has_price, rows))
    assert not simulated(1, 5).is_precise(1e9) and simulated(1, 6).is_precise(1e9)
    assert TimedRounds(COMPARED).rows() == [] and not TimedRounds(COMPARED).is_precise(1e9)


def test_a_server_that_does_not_stream_has_a_throughput_alone() -> None:
    rounds = TimedRounds(COMPARED)
    for _ in range(6):
        rng = random.Random(0)
        rounds.add({name: [made(1.0, rng, 0.0, is_streamed=name != "versus")] for name in ARMS})
    assert [row.case for row in rounds.rows()] == [THROUGHPUT]


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
