"""Tests and limits over rounds, against published values and exact counts; intervals are in test_intervals.py."""

from __future__ import annotations

import math

import pytest

from kvcheck.core.base.rounds import holm, interval, sign_p


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
