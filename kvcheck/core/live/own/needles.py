"""Crosstalk: runs of tokens drawn for one request, found in the answer to another.

Each token of a prompt is drawn from `drawn` ids and repeats none of the at most half of them used before. So an answer
contains a run of n tokens of an unseen prompt by chance in at most (2 / drawn)^n of cases. The shortest run that counts
keeps the sum over all pairs of places of a run below CHANCE.

Invariants:
- A run in the request itself is its own.
- Answered tokens are no needles, also if the next turn of a conversation repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvcheck.core.live.exchange import Question
from kvcheck.core.live.own.prompts import BLOCK, FRAME

CHANCE = 1e-9
"""Largest probability of a false finding in a whole run."""
FEW = 8
"""Owners of a run that are kept: those that share a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crosstalk:
    """A recited run. step: of the answer, at which it begins. owners: requests that hold it."""

    step: int
    run: tuple[int, ...]
    owners: tuple[int, ...]


def shortest_run(drawn: int, *, prompt_tokens: int, answer_tokens: int) -> int:
    pairs = max(1, prompt_tokens) * max(1, answer_tokens)
    needed = math.ceil(math.log(pairs / CHANCE) / math.log(drawn / 2))
    return min(max(4, needed), BLOCK - FRAME)


class Needles:
    """All runs of tokens of a run's requests. length: of the shortest that counts. drawn: as in Ids."""

    def __init__(self, *, length: int, drawn: int) -> None:
        self.length, self._drawn = length, drawn
        self._owners: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._looked_at = 0

    def add(self, question: Question, runs: Iterable[tuple[int, ...]]) -> None:
        for run in runs:
            for window in _windows(run, self.length):
                owners = self._owners.get(window, ())
                if question.number not in owners and len(owners) < FEW:
                    self._owners[window] = (*owners, question.number)

    def crosstalk(self, question: Question, tokens: tuple[int, ...]) -> Crosstalk | None:
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
        """The largest probability of a chance match in a run like this one."""
        return min(1.0, self._looked_at * len(self._owners) * (2 / self._drawn) ** self.length)


def recites(code: tuple[int, ...], tokens: tuple[int, ...], length: int) -> bool:
    """Whether an answer begins with the requested code, or with a needle's length of it."""
    most = min(len(code), length)
    return tokens[:most] == code[:most]


def _windows(tokens: tuple[int, ...], length: int) -> list[tuple[int, ...]]:
    return [tokens[at : at + length] for at in range(len(tokens) - length + 1)]


def _holds(tokens: tuple[int, ...], run: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(run)] == run for at in range(len(tokens) - len(run) + 1))
