"""The statistics of rounds: medians, intervals that assume no distribution, and the noise floor.

The interval of n rounds goes from the k-th smallest value to the k-th largest, with the largest k for which the median
lies outside at most once in twenty times: whether a round falls on one side of the median is the toss of a coin,
whatever the distribution. 15 rounds: from the 4th to the 12th value, 96.5 %.

Invariants:
- Fewer than LEAST_ROUNDS values have no interval: even from the smallest to the largest they would not reach 95 %.
- Ratios are worked with as logarithms, so that twice as fast and twice as slow lie equally far from 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kvcheck.core.record import Interval

LEAST_ROUNDS = 6
CONFIDENCE = 0.95


def order_of(rounds: int) -> int | None:
    """k: the interval is from the k-th smallest to the k-th largest value; None where there is none."""
    if rounds < LEAST_ROUNDS:
        return None
    outside = 1.0 - CONFIDENCE
    k, below = 0, 0.0
    while 2.0 * (below + math.comb(rounds, k) * 0.5**rounds) <= outside:
        below += math.comb(rounds, k) * 0.5**rounds
        k += 1
    return k


def interval(values: Sequence[float]) -> Interval:
    """The median and its interval of at least 95 %."""
    ordered = sorted(values)
    k = order_of(len(ordered))
    middle = statistics.median(ordered)
    return Interval(middle) if k is None else Interval(middle, ordered[k - 1], ordered[-k])


def ratio_interval(logs: Sequence[float]) -> Interval:
    """The interval of a ratio from the logarithms of it, one a round."""
    found = interval(logs)
    return Interval(
        math.exp(found.est),
        None if found.lo is None else math.exp(found.lo),
        None if found.hi is None else math.exp(found.hi),
    )


def half_width(ratio: Interval) -> float | None:
    """How far the ratio's interval reaches to either side, as a share; None where there is no interval."""
    if ratio.lo is None or ratio.hi is None:
        return None
    return (math.log(ratio.hi) - math.log(ratio.lo)) / 2.0


def floor_of(logs: Sequence[float]) -> float:
    """How far from 1 the baseline's ratio to itself may lie: the upper end of its distance's interval."""
    found = interval([abs(each) for each in logs])
    upper = found.hi if found.hi is not None else max(abs(each) for each in logs)
    return math.expm1(upper)
