"""The statistics of rounds on hand-written series, against published values, on known noise and under drift."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from kvcheck.core.base.record import Interval
from kvcheck.core.base.rounds import floor_of, half_width, holm, interval, order_of, ratio_interval, sign_p
from kvcheck.core.bench.measure import run_blocks


@pytest.mark.parametrize("rounds", [6, 9, 15, 40])
def test_the_order_is_the_largest_that_keeps_95_percent(rounds: int) -> None:
    order = order_of(rounds)
    assert order is not None and order_of(5) is None

    def outside(k: int) -> float:
        return 2 * sum(math.comb(rounds, below) for below in range(k)) / 2**rounds

    assert outside(order) <= 0.05 < outside(order + 1)


def test_interval_of_a_hand_written_series() -> None:
    series = [9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 11.0, 15.0, 13.0, 10.0, 14.0, 12.0]
    assert interval(series) == Interval(8.0, 4.0, 12.0)
    assert interval([2.0, 1.0, 4.0, 3.0]) == Interval(2.5)
    assert interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == Interval(3.5, 1.0, 6.0)


def test_ratios_are_worked_with_as_logarithms() -> None:
    logs = [math.log(value) for value in (0.5, 0.5, 1.0, 1.0, 2.0, 2.0)]
    ratio = ratio_interval(logs)
    assert ratio.est == pytest.approx(1.0)
    assert (ratio.lo, ratio.hi) == pytest.approx((0.5, 2.0))
    assert half_width(ratio) == pytest.approx(math.log(2.0))
    assert half_width(ratio_interval(logs[:5])) is None


def test_the_floor_is_the_upper_end_of_the_distance_from_one() -> None:
    logs = [math.log(1.01), -math.log(1.01), math.log(1.02), -math.log(1.02), math.log(1.03), -math.log(1.03)]
    assert floor_of(logs) == pytest.approx(0.03)
    assert floor_of([-math.log(1.10), math.log(1.02)]) == pytest.approx(0.10)  # too few for an interval: the farthest


@pytest.mark.parametrize("rounds", [6, 15, 30])
def test_coverage_on_skewed_noise(rounds: int) -> None:
    random = np.random.default_rng(rounds)
    inside = 0
    for _ in range(2000):
        found = interval([float(value) for value in random.exponential(size=rounds)])
        assert found.lo is not None and found.hi is not None
        inside += found.lo <= math.log(2.0) <= found.hi  # the median of that distribution
    assert 0.94 <= inside / 2000 <= 0.99


def test_an_interval_of_many_rounds_misses_at_most_one_in_forty_on_each_side() -> None:
    values = [float(value) for value in range(1, 2001)]
    found = interval(values)
    assert found.lo is not None
    beyond = sum(math.comb(2000, number) for number in range(int(found.lo))) / 2**2000
    assert 0.02 < beyond <= 0.025


@pytest.mark.parametrize(
    ("above", "rounds", "p"), [(12, 15, 576 / 32768), (15, 15, 1 / 32768), (0, 15, 1.0), (8, 10, 56 / 1024)]
)
def test_the_sign_test_counts_tosses(above: int, rounds: int, p: float) -> None:
    values = [1.2] * above + [1.0] * (rounds - above)  # what is equal to the threshold is not above it
    assert sign_p(values, 1.0) == pytest.approx(p)


def test_holm_gives_the_published_correction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.5, 0.9]) == (1.0, 1.0)
    assert holm([]) == ()


def drifting(random: np.random.Generator, *, stalls: float, **costs: float) -> float:
    """The logarithm of b's time over a's: up to 60 % of drift within a round, and stalls of eight batches."""
    ticks, slope = itertools.count(), random.uniform(-0.6, 0.6)

    def batch(cost: float) -> int:
        stall = 8.0 if random.random() < stalls else 1.0
        return round(cost * (1 + slope * next(ticks) / 40) * stall * random.normal(1, 0.01))

    taken = run_blocks({arm: functools.partial(batch, cost) for arm, cost in costs.items()}, random)
    return math.log(taken["b"] / taken["a"])


def test_equal_arms_stay_equal_on_a_machine_that_slows_down_and_stalls() -> None:
    """An order that does not alternate sees the drift."""
    random = np.random.default_rng(5)
    alarms = 0
    for _ in range(200):
        ratio = ratio_interval([drifting(random, stalls=0.05, a=250_000, b=250_000, c=250_000) for _ in range(15)])
        assert ratio.lo is not None and ratio.hi is not None
        alarms += not ratio.lo / 1.01 <= 1 <= ratio.hi * 1.01
    assert alarms == 0


def test_a_slower_arm_is_seen_under_the_same_drift() -> None:
    random = np.random.default_rng(6)
    ratio = ratio_interval([drifting(random, stalls=0, a=250_000, b=300_000) for _ in range(15)])
    assert ratio.lo is not None and ratio.lo > 1.1 and ratio.est == pytest.approx(1.2, abs=0.05)
