"""Splits rotary pairs: weighted fast ones that distinguish positions, and slow ones for content.

A query for the position `distance` back scores the key at displacement e from it by sum_j w_j cos(f_j e). The loss at e
is that sum's distance from its peak; the smallest loss over all displacements is the gap of the position test.

Invariants:
- Pair j rotates dimensions j and j + head_dim / 2 of a head (the half split of Llama) by position * theta ** (-2j /
  head_dim).
- A slow pair rotates by at most LEAK radians over the whole length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError

# Large enough that half of 32 pairs turn slowly over 131,072 positions; float32 holds its powers in every engine.
THETA = 1e15
LEAK = 0.02
# Turning of at least this much over the whole length makes a pair useful to distinguish positions.
USEFUL_TURN = 2.0
LEAST_FAST = 3
_ROUNDS = 400


@dataclass(frozen=True, slots=True)
class Rotary:
    """A split of rotary pairs. fast: pairs, with their weights (sum 1) and frequencies (radians a position). slow_dims:
    the slowest first. gap: in units of the peak."""

    fast: tuple[int, ...]
    weights: tuple[float, ...]
    frequencies: tuple[float, ...]
    slow_dims: tuple[int, ...]
    gap: float


@cache  # takes seconds for a long request; called to fit digits and to write weights
def plan_rotary(head_dim: int, length: int, theta: float = THETA) -> Rotary:
    half = head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    fast = np.flatnonzero(frequencies * length >= USEFUL_TURN)
    slow = np.flatnonzero(frequencies * length <= LEAK)
    if fast.size < LEAST_FAST:
        raise UsageError(
            f"a head of {head_dim} dimensions has {fast.size} pairs that tell {length} positions apart; expected 3"
        )
    weights, gap = _best_weights(frequencies[fast], length)
    dims = [int(pair) + first for pair in reversed(slow) for first in (0, half)]
    return Rotary(
        tuple(int(pair) for pair in fast),
        tuple(float(weight) for weight in weights),
        tuple(float(frequency) for frequency in frequencies[fast]),
        tuple(dims),
        float(gap),
    )


def _best_weights(frequencies: npt.NDArray[np.float64], length: int) -> tuple[npt.NDArray[np.float64], float]:
    """Weights that maximize the smallest loss: a zero-sum game, solved by multiplicative weights."""
    loss = 1 - np.cos(np.outer(np.arange(1, length), frequencies))
    log_odds = np.zeros(len(loss))
    summed = np.zeros(len(frequencies))
    log_weights = np.zeros(len(frequencies))
    for _ in range(_ROUNDS):
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        summed += weights
        odds = np.exp(log_odds - log_odds.max())
        odds /= odds.sum()
        log_weights += 0.1 * (odds @ loss)
        log_odds -= 0.5 * (loss @ weights)
    # Whole 256ths, so that rounding of another machine's sums does not change the model.
    weights = np.maximum(np.round(256 * summed / summed.sum()), 1)
    weights /= weights.sum()
    return weights, float((loss @ weights).min())
