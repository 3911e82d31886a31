"""Rounds of two arms and a control: their order, their rows, and how often equal arms are told apart."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from kvcheck.core.base.record import BenchRow
from kvcheck.core.base.server_facts import THROUGHPUT
from kvcheck.core.live.prices.rounds import CONTROL, Compared, TimedRounds, Times, order_of_passes
from kvcheck.core.report.prices import ALIKE, TOO_FEW, has_price, verdict

COMPARED = Compared(arm="versus", baseline="target", size="4x96+8@4", shape="llama-4x2x64", device="sglang")
ARMS = ("target", CONTROL, "versus")
TOLD_APART = {"faster", "slower"}


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
