"""Statistics of rounds: medians, intervals and tests that assume no distribution, and the noise floor.

A round is one number, measured with fresh memory and in a random order of its own; only rounds are independent samples.
The interval of n rounds goes from the k-th smallest to the k-th largest value, with the largest k that excludes the
median in at most 5 % of cases, by the binomial distribution. 15 rounds: from the 4th to the 12th value, 96.5 %. Busy
machines give long tails, so means and variances are not used. Order statistics and sign tests: Conover, Practical
Nonparametric Statistics; several claims at once: Holm, Scand. J. Statist. 6 (1979).

Invariants:
- Fewer than LEAST_ROUNDS values have no interval: even from the smallest to the largest, it has less than 95 %.
- Statistics of ratios use logarithms, so that twice as fast and twice as slow lie equally far from 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

from kvcheck.core.base.record import Interval

LEAST_ROUNDS = 6
NOISY_FLOOR = 0.05
CONFIDENCE = 0.95
TAIL = (1.0 - CONFIDENCE) / 2.0


@cache
def order_of(rounds: int) -> int | None:
    if rounds < LEAST_ROUNDS:
        return None
    k, below = 0, 0.0
    while below + _chance(rounds, k) <= TAIL:
        below += _chance(rounds, k)
        k += 1
    return k


def interval(values: Sequence[float]) -> Interval:
    ordered = sorted(values)
    k = order_of(len(ordered))
    middle = statistics.median(ordered)
    return Interval(middle) if k is None else Interval(middle, ordered[k - 1], ordered[-k])


def ratio_interval(logs: Sequence[float]) -> Interval:
    """The interval of a ratio. logs: its logarithms, one a round."""
    found = interval(logs)
    return Interval(
        math.exp(found.est),
        None if found.lo is None else math.exp(found.lo),
        None if found.hi is None else math.exp(found.hi),
    )


def half_width(ratio: Interval) -> float | None:
    if ratio.lo is None or ratio.hi is None:
        return None
    return (math.log(ratio.hi) - math.log(ratio.lo)) / 2.0


def floor_of(logs: Sequence[float]) -> float:
    """The noise floor: upper end of the interval of the distance from 1 of the baseline's ratio to itself."""
    found = interval([abs(each) for each in logs])
    upper = found.hi if found.hi is not None else max(abs(each) for each in logs)
    return math.expm1(upper)


def sign_p(rounds: Sequence[float], threshold: float) -> float:
    """p-value of a one-sided sign test against the claim that the true median is not above `threshold`."""
    above = sum(value > threshold for value in rounds)
    return min(1.0, math.fsum(_chance(len(rounds), number) for number in range(above, len(rounds) + 1)))


def holm(values: Sequence[float]) -> tuple[float, ...]:
    """Holm-corrected p-values, in the order given. Accepting all up to `a` errs in at most `a` of families."""
    adjusted, worst = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        adjusted[at] = worst
    return tuple(adjusted)


@cache
def _chance(count: int, number: int) -> float:
    """Probability of exactly `number` heads in `count` tosses, by logarithms: factors of a thousand rounds overflow."""
    ways = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
    return math.exp(ways - count * math.log(2))
