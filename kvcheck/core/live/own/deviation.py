"""The distance of an answer from its reference in nats, while both have the same tokens before them.

    reference   a  b  c  d          steps 0 to 2 are compared: at 2 both still have the same tokens before them
    answer      a  b  x  y          later steps are no evidence

At each step the log-probabilities of all tokens in both lists are compared. A token missing from one list is at most as
likely there as the list's least likely token. Without lists, the answered tokens alone are compared: each is at least
as likely as any other.

Invariants:
- Equal numbers give exactly 0.0. An impossible comparison is None, never 0.
- The value for a missing token is a lower bound, so no difference is invented.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.live.exchange import Answer

_FLOAT32 = 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A distance from the reference. largest: nats; 0.0: equal bit for bit. step: of the largest. flip: the first step
    with another token."""

    largest: float
    step: int
    flip: int | None
    tokens: int

    @property
    def is_none(self) -> bool:
        return self.largest == 0.0 and self.flip is None


def deviation(reference: Answer, answer: Answer, *, most: int | None = None) -> Deviation | None:
    """The largest difference; None without log-probabilities. most: steps to compare."""
    if reference.logprobs is None or answer.logprobs is None:
        return None
    count = min(len(reference.tokens), len(answer.tokens), most if most is not None else len(answer.tokens))
    if not count:
        return None
    flip = next((step for step in range(count) if reference.tokens[step] != answer.tokens[step]), None)
    compared = count if flip is None else flip + 1
    differences = [_difference(_row(reference, step), _row(answer, step)) for step in range(compared)]
    largest = max(differences)
    return Deviation(largest=largest, step=differences.index(largest), flip=flip, tokens=compared)


@dataclass(frozen=True, slots=True)
class _Row:
    token: int
    logprob: float
    top: Mapping[int, float]
    is_listed: bool


def _row(answer: Answer, step: int) -> _Row:
    assert answer.logprobs is not None
    token, value = answer.tokens[step], answer.logprobs[step]
    listed = answer.top[step] if answer.top is not None else {}
    return _Row(token, value, {**listed, token: value}, len(listed) > 1)


def _difference(one: _Row, two: _Row) -> float:
    largest = max((abs(one.top[token] - two.top[token]) for token in one.top.keys() & two.top.keys()), default=0.0)
    return max(largest, _lacking(one, two), _lacking(two, one))


def _lacking(one: _Row, two: _Row) -> float:
    """The least difference of the answered token of `one`, if `two` does not list it."""
    if one.token in two.top:
        return 0.0
    most = min(two.top.values()) if two.is_listed else min(two.logprob, _rest(two.logprob))
    return max(0.0, one.logprob - most)


def _rest(logprob: float) -> float:
    """The largest log-probability of all other tokens together; float32 rounds values nearer to 1."""
    return math.log(max(-math.expm1(min(logprob, 0.0)), _FLOAT32))
