"""The statistic over deviations: literal arms that have to accuse, and legal ones that must not."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from kvcheck.core.live.own.statistic import (
    ALPHA,
    MORE_CONTROLS,
    MOST_SUSPECTS,
    REPEATS,
    Ground,
    Level,
    Measured,
    Repeats,
    can_tell_many,
    is_wide,
    judge,
    leading,
    leading_p,
    least_found,
    needs_more,
    paired_p,
    settled,
)
from tools.tables.own_noise_table import NOISES, Noise, one_run, row

LEVEL = Level(rounds=1)
RUNS = 100
ZEROS = (0.0,) * 50
NOISY = tuple(0.01 + 0.0001 * i for i in range(50))
MATCHED = dict(enumerate(NOISY))
SHOWN = Repeats((3.0,) * REPEATS, (0.0,) * REPEATS)


def noisy(moved: dict[int, float] | None = None, **changes: Any) -> Measured:
    """A server with noise in all arms, but for the requests that were moved there, or for other arms."""
    arms = Measured(treated=MATCHED | (moved or {}), again=NOISY, control=NOISY, matched=NOISY, now_matched=MATCHED)
    return replace(arms, **changes)


def exact(moved: dict[int, float], **changes: Any) -> Measured:
    """A server whose controls are equal bit for bit, but for the requests that were moved there."""
    arms = Measured(treated=dict.fromkeys(range(50), 0.0) | moved, again=ZEROS, control=ZEROS, matched=ZEROS)
    return replace(arms, **changes)


def shifted(count: int, nats: float = 0.05) -> dict[int, float]:
    """The first deviations, each that much larger."""
    return {i: NOISY[i] + nats for i in range(count)}


def test_equal_arms_ties_and_noise_of_one_kind_accuse_nobody() -> None:
    same = (0.0625,) * 50
    tied = noisy(dict(enumerate(same)), again=same, control=same, matched=same, now_matched=dict(enumerate(same)))
    assert judge(exact({}), LEVEL) == judge(noisy(), LEVEL) == judge(tied, LEVEL) == []


def test_one_wide_request_of_an_exact_server_is_a_finding_also_where_it_does_not_come_again() -> None:
    (told,) = judge(exact({7: 2.0}), LEVEL)
    assert told.is_finding and told.request == 7 and told.ground is Ground.EXACT


def test_a_small_difference_of_an_exact_server_is_unsteady() -> None:
    (told,) = judge(exact({7: 0.01}), LEVEL)
    assert not told.is_finding and told.request == 7


def test_one_wide_request_among_noise_needs_to_come_again() -> None:
    (told,) = judge(noisy({7: 3.0}), LEVEL)
    assert not told.is_finding, "it diverged once"
    (told,) = judge(noisy({7: 3.0}, repeats={7: SHOWN}), LEVEL)
    assert told.is_finding and told.ground is Ground.AGAIN and told.p is not None and told.p < 1e-6


def test_fresh_copies_that_deviate_as_well_take_the_accusation_back() -> None:
    both = Repeats((3.0,) * REPEATS, (3.1,) * REPEATS)
    found = judge(exact({7: 3.0}, repeats={7: both}), LEVEL)
    assert found == [], "no control of this server is exact any more, and 3 nats are its noise"


def test_one_request_that_noise_comes_near_to_is_no_finding() -> None:
    assert judge(noisy({7: 3.0}, control=(*NOISY[:-1], 0.7), repeats={7: SHOWN}), LEVEL) == []


def test_many_small_shifts_are_a_finding_and_few_are_not() -> None:
    assert judge(noisy(shifted(5)), LEVEL) == []
    (told,) = judge(noisy(shifted(20)), LEVEL)
    assert told.ground is Ground.MANY and told.is_finding and told.p is not None and told.p <= LEVEL.many


def test_shifts_of_several_rounds_add_up() -> None:
    first, level = noisy(shifted(6)), Level(rounds=4)
    assert judge(first, level) == []
    (told,) = judge(
        replace(first, matched=NOISY * 3, earlier=[*first.treated.values()] * 2, earlier_matched=NOISY * 2), level
    )
    assert told.ground is Ground.MANY


def test_a_treated_arm_without_matched_controls_is_never_accused_of_many() -> None:
    arms = Measured(treated=dict.fromkeys(range(50), 0.1), again=NOISY, control=NOISY)
    assert not [each for each in judge(arms, LEVEL) if each.is_finding]


@pytest.mark.parametrize(("nats", "told"), [(0.0, []), (0.05, [False]), (2.0, [True])])
def test_many_requests_of_other_shapes_than_their_controls_have_to_be_wide(nats: float, told: list[bool]) -> None:
    """Kernels of another shape shift many by a little."""
    found = judge(noisy(shifted(20, nats), is_alike=False), LEVEL)
    assert [each.is_finding for each in found if each.ground is Ground.MANY] == told


def test_the_levels_of_a_run_add_up_to_alpha() -> None:
    for rounds in (1, 6, 24):
        level = Level(rounds=rounds)
        assert rounds * level.many + rounds * MOST_SUSPECTS * level.again == pytest.approx(ALPHA)
    assert Repeats((1.0,) * REPEATS, (0.0,) * REPEATS).p < Level(rounds=24).again, "a suspect of a long run can be told"
    assert Repeats((1.0,) * 4, (0.0,) * 4).p > LEVEL.again, "four repeats show nothing"


def test_the_probability_of_leading_values_is_that_of_all_orders() -> None:
    n, m = 4, 3
    for k in range(n + 1):
        orders = [*combinations(range(n + m), m)]  # places of the controls, from the largest value down
        leads = sum(min(places) >= k for places in orders)
        assert leading_p(k, n, m) == pytest.approx(leads / len(orders))
    assert leading((1.0, 2.0, 2.0), (2.0, 0.0)) == 0, "a tie counts against a finding"
    assert leading((1.0,), ()) == 0 and leading_p(0, 1, 0) == 1.0


def test_wide_is_beyond_all_controls_by_a_factor_and_beyond_rounding() -> None:
    assert is_wide(0.6, ZEROS) and not is_wide(0.4, ZEROS)
    assert is_wide(1.1, (0.2,)) and not is_wide(0.9, (0.2,))
    assert not is_wide(math.nan, (0.2,))


def test_what_a_run_would_have_found_is_what_it_says() -> None:
    for noise in (0.0, 0.05, 0.4):
        arms = (noise,) * 50
        least = least_found(50, arms * 3)
        for nats, is_found in ((least * 1.01, True), (least * 0.97, False)):
            end = Measured(
                treated=dict.fromkeys(range(50), noise) | {7: nats},
                again=arms,
                control=arms * (1 + MORE_CONTROLS),
                matched=arms,
                now_matched=dict(enumerate(arms)),
                repeats={7: Repeats((nats,) * REPEATS, (noise,) * REPEATS)},
            )
            told = judge(end, LEVEL)
            assert any(each.is_finding for each in settled(told, end)) == is_found


def test_an_accusation_of_one_request_waits_for_more_controls() -> None:
    few = exact({7: 0.6})
    told = judge(few, LEVEL)
    assert needs_more(told, few), "150 x 6^2 < 5 x 50 x 200"
    assert not any(each.is_finding for each in settled(told, few))
    enough, far = exact({7: 0.6}, control=ZEROS * 26), exact({7: 2.0})
    assert not needs_more(judge(enough, LEVEL), enough)
    assert not needs_more(judge(far, LEVEL), far), "150 x 20^2"
    all_of_them = noisy(shifted(50, 0.1), control=())
    many = judge(all_of_them, LEVEL)
    assert not needs_more(many, all_of_them) and all(each.is_finding for each in settled(many, all_of_them))


def test_a_request_that_is_too_near_takes_nothing_back_of_one_that_is_far_enough() -> None:
    near = Repeats((0.6,) * REPEATS, (0.0,) * REPEATS)
    both = exact({7: 3.5, 9: 0.6}, again=NOISY, control=NOISY, matched=NOISY, repeats={7: SHOWN, 9: near})
    told = judge(both, LEVEL)
    assert [each.request for each in told if each.is_finding] == [7, 9]
    assert not needs_more(told, both), "one is found, whatever further controls say"
    assert [(each.request, each.is_finding) for each in settled(told, both)] == [(7, True), (9, False)]


@pytest.mark.parametrize(
    ("groups", "own", "is_told"),
    [
        ({}, 0.0, True),  # twelve requests with pages of their own
        ({i: i // 2 * 2 for i in range(4)}, 0.0, True),  # ten groups
        ({i: i // 3 * 3 for i in range(12)}, 0.0, False),  # four pages, read by three each
        (dict.fromkeys(range(50), 0), 0.0, False),  # all begin alike
        ({}, 0.06, False),  # the matched request of one of them lies further
    ],
)
def test_requests_that_read_one_page_count_once(groups: dict[int, int], own: float, is_told: bool) -> None:
    """A page that was written in an unusual batch moves all who read it, without a fault."""
    arms = noisy(shifted(12), control=(), now_matched=MATCHED | {0: MATCHED[0] + own}, groups=groups)
    assert bool(judge(arms, LEVEL)) == is_told


def test_a_request_without_a_matched_one_does_not_count_among_many() -> None:
    matched = {i: value for i, value in MATCHED.items() if i >= 4}
    assert judge(noisy(shifted(12), control=(), now_matched=matched), LEVEL) == []
    fewest = next(n for n in range(1, 50) if can_tell_many(n, LEVEL))
    assert (fewest, paired_p(fewest) <= LEVEL.many < paired_p(fewest - 1)) == (9, True)


def test_pairs_lead_as_seldom_as_is_said_where_orders_are_not_equally_likely() -> None:
    """Each request deviates in one of its two arms, either with the same right."""
    rng, runs, led = random.Random(1), 8000, 0
    for _ in range(runs):
        moved = {i: rng.random() < 0.5 for i in range(6)}
        arms = Measured(
            treated={i: 1.0 + i if is_treated else 0.0 for i, is_treated in moved.items()},
            now_matched={i: 0.0 if is_treated else 1.0 + i for i, is_treated in moved.items()},
        )
        led += leading(*arms.grouped()) >= 3
    assert led / runs == pytest.approx(paired_p(3), rel=0.1)
    assert led / runs > leading_p(3, 6, 6), "the formula for equal requests promises less"


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_equal_servers_are_seldom_accused_whatever_their_noise(noise: Noise) -> None:
    found = row(noise, RUNS)
    assert int(str(found["false alarms"])) <= 2, "the table of 4,000 runs has the rates"


def test_a_stale_page_among_small_noise_is_found() -> None:
    ends = [one_run(NOISES[1], random.Random(n), planted=2.0) for n in range(40)]
    assert ends.count("fail") >= 38
