"""Crosstalk: runs of tokens that were drawn for one request, found in the answer to another.

Each token of a prompt is drawn from `drawn` ids and repeats none of the at most half of them that the prompt used
before. Whatever an answer holds, it meets a run of n tokens of a prompt that it has not seen by chance in at most
(2 / drawn)^n of cases. The shortest run that counts is chosen so that the sum over all pairs of places of a run is at
most CHANCE.

Invariants:
- A run that stands in the request itself is its own, also where others begin as it does.
- What a server answered is nobody's needle, also where the next turn of a conversation repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvcheck.core.live.exchange import Question
from kvcheck.core.live.own.prompts import BLOCK, FRAME

CHANCE = 1e-9
"""Of a whole run between servers without a fault."""
FEW = 8
"""Owners of a run that are kept: those that share a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crosstalk:
    """What an answer recites. step: where in the answer it begins. run: the tokens. owners: requests that hold them."""

    step: int
    run: tuple[int, ...]
    owners: tuple[int, ...]


def shortest_run(drawn: int, *, prompt_tokens: int, answer_tokens: int) -> int:
    """Tokens of the shortest run that counts, where so many tokens are sent and answered in all."""
    pairs = max(1, prompt_tokens) * max(1, answer_tokens)
    needed = math.ceil(math.log(pairs / CHANCE) / math.log(drawn / 2))
    return min(max(4, needed), BLOCK - FRAME)


class Needles:
    """All runs of a run's requests. length: tokens of the shortest run that counts. drawn: as in Ids."""

    def __init__(self, *, length: int, drawn: int) -> None:
        self.length, self._drawn = length, drawn
        self._owners: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._looked_at = 0

    def add(self, question: Question, runs: Iterable[tuple[int, ...]]) -> None:
        """The runs of a request that is about to be sent."""
        for run in runs:
            for window in _windows(run, self.length):
                owners = self._owners.get(window, ())
                if question.number not in owners and len(owners) < FEW:
                    self._owners[window] = (*owners, question.number)

    def crosstalk(self, question: Question, tokens: tuple[int, ...]) -> Crosstalk | None:
        """The first run of another request in an answer; None where there is none."""
        windows = _windows(tokens, self.length)
        self._looked_at += len(windows)
        for step, window in enumerate(windows):
            owners = self._owners.get(window)
            if owners is None or question.number in owners or _holds(question.ids, window):
                continue
            end = step + self.length
            while end < len(tokens) and tokens[end - self.length + 1 : end + 1] in self._owners:
                end += 1
            return Crosstalk(step=step, run=tokens[step:end], owners=owners)
        return None

    @property
    def chance(self) -> float:
        """At most so often a run like this one meets a needle by chance."""
        return min(1.0, self._looked_at * len(self._owners) * (2 / self._drawn) ** self.length)


def recites(code: tuple[int, ...], tokens: tuple[int, ...], length: int) -> bool:
    """Whether an answer begins with the code that it was asked for, or with as much of it as makes a needle."""
    most = min(len(code), length)
    return tokens[:most] == code[:most]


def _windows(tokens: tuple[int, ...], length: int) -> list[tuple[int, ...]]:
    return [tokens[at : at + length] for at in range(len(tokens) - length + 1)]


def _holds(tokens: tuple[int, ...], run: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(run)] == run for at in range(len(tokens) - len(run) + 1))
