"""Prompts for a model with unknown answers: drawn tokens, with codes that belong to one request.

    block of 16 positions:   6 tokens of filling  opener  marker  8 tokens of a code
    end of a prompt:         opener  marker of one of its blocks; the code of that block should follow

Opener and markers are the same for all prompts; the other tokens are drawn for one prompt. A trained model completes
repeated sequences, and so continues with the code.

Invariants:
- Equal seeds, names and answers give equal prompts. Other names give the same situation in other tokens.
- A token's place in its block follows from its position, so a prefix cut anywhere can be continued.
- A prompt repeats no drawn token before half of the vocabulary is used, as the chance in `needles` requires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question
from kvcheck.core.live.questions import Subject

# A block begins with drawn tokens: with pages of one token, all requests would otherwise read the pages of the same
# first two tokens and share their noise.
BLOCK, FILLING, FRAME, CODE = 16, 6, 2, 8
"""Tokens of a block, of its filling, of its opener and marker, and of its code, in this order."""
MARKERS = 64
SHORTEST = 2 * BLOCK
LEAST_IDS = 256
SPECIAL = 300
"""Lower ids are often bytes or special tokens; they are left out if the vocabulary is large enough."""
ANSWER = 32
LEAST_LENGTH = 64

Span = tuple[int, int]
"""(first, end): tokens of a request from `first` to below `end`."""
CHANCE = 1e-9
"""Largest probability of a false finding in a whole run."""
FEW = 8
"""Owners of a run that are kept: those that share a prefix."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids of prompts: from `first` to below `end`."""

    first: int
    end: int

    @property
    def drawn(self) -> int:
        return self.end - self.first - MARKERS - 1


def ids_of(vocabulary: int) -> Ids:
    if not LEAST_IDS <= vocabulary <= 1 << 24:
        raise UsageError(
            f"--vocabulary: expected {LEAST_IDS} to {1 << 24:,} token ids, got {vocabulary}; the model's config.json "
            "names it vocab_size"
        )
    return Ids(min(SPECIAL, vocabulary // 4), vocabulary)


class OwnQuestions:
    """answers: to requests that the next turn of a conversation repeats, by number. Missing ones are in `wanted`
    afterwards; the drawn round then only serves to get them."""

    def __init__(
        self,
        ids: Ids,
        *,
        longest: int,
        names: int,
        first: int = 0,
        answers: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        if longest < LEAST_LENGTH:
            raise UsageError(
                f"prompts need a server that takes {LEAST_LENGTH} tokens or more; this one takes {longest}"
            )
        self.longest = longest
        self._own: dict[int, tuple[int, ...]] = {}
        self._block: dict[int, int] = {}
        self._turns: dict[int, tuple[Span, ...]] = {}
        self.wanted: dict[int, Question] = {}
        self._ids, self._next, self._answers = ids, first, answers or {}
        draws = Rng(names)
        order = list(range(ids.first, ids.end))
        for at in range(MARKERS + 1):
            other = at + draws.below(len(order) - at)
            order[at], order[other] = order[other], order[at]
        self._opener, self._markers = order[0], order[1 : MARKERS + 1]
        self._drawn = order[MARKERS + 1 :]

    @property
    def has_marks(self) -> bool:
        """A position test needs known answers."""
        return False

    def walk(self, rng: Rng, places: int, *, prefix: Subject | None = None) -> Subject:
        shared = prefix.values if prefix is not None else ()
        length = min(max(places, len(shared) + FRAME, SHORTEST), self.longest - FRAME - 1)
        used = set(shared)
        tokens = [*shared[:length]]
        for position in range(len(tokens), length):
            tokens.append(self._token(rng, position, used))
        return Subject(tuple(tokens))

    def marks(self, rng: Rng, *, prefix: Subject | None = None) -> Subject:
        return self.walk(rng, SHORTEST, prefix=prefix)

    def put(self, rng: Rng, subject: Subject, tokens: int, *, start: int | None = None) -> Question:
        """Append the marker of a whole block. start: a position in that block."""
        blocks = len(subject.values) // BLOCK
        drawn = rng.below(blocks)
        block = drawn if start is None else min(start // BLOCK, blocks - 1)
        ids = (*subject.values, self._opener, self._marker(block))
        return self._question(ids, tokens, block, subject.values)

    def again(self, rng: Rng, before: Question, tokens: int) -> Question:
        answer = self._answers.get(before.number)
        if answer is None:
            self.wanted[before.number] = before
            answer = before.expected
        own = self._own[before.number]
        block = rng.below(len(own) // BLOCK)
        question = self._question((*before.ids, *answer, self._opener, self._marker(block)), tokens, block, own)
        first = len(before.ids)
        self._turns[question.number] = (*self.turns(before.number), (first, first + len(answer)))
        return question

    def cover(self, subject: Subject) -> int:
        return ANSWER

    def drawn(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Runs of tokens drawn for this request, or for the one that it begins with."""
        values = self._own[number]
        starts = range(FILLING + FRAME, len(values), BLOCK)
        return (values[:FILLING], *(values[start : start + BLOCK - FRAME] for start in starts))

    def turns(self, number: int) -> tuple[Span, ...]:
        return self._turns.get(number, ())

    def code_asked(self, question: Question) -> tuple[int, ...]:
        start = self._block[question.number] * BLOCK + FILLING + FRAME
        return question.ids[start : start + CODE]

    def _question(self, ids: tuple[int, ...], tokens: int, block: int, own: tuple[int, ...]) -> Question:
        room = max(1, min(tokens, self.longest - len(ids)))
        question = Question(number=self._next, ids=ids, expected=(self._opener,) * room)
        self._own[self._next], self._block[self._next] = own, block
        self._next += 1
        return question

    def _token(self, rng: Rng, position: int, used: set[int]) -> int:
        place = position % BLOCK - FILLING
        if 0 <= place < FRAME:
            return self._opener if place == 0 else self._marker(position // BLOCK)
        if 2 * len(used) >= len(self._drawn):
            used.clear()
        while True:
            token = self._drawn[rng.below(len(self._drawn))]
            if token not in used:
                used.add(token)
                return token

    def _marker(self, block: int) -> int:
        return self._markers[block % MARKERS]


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
    most = min(len(code), length)
    return tokens[:most] == code[:most]


def _windows(tokens: tuple[int, ...], length: int) -> list[tuple[int, ...]]:
    return [tokens[at : at + length] for at in range(len(tokens) - length + 1)]


def _holds(tokens: tuple[int, ...], run: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(run)] == run for at in range(len(tokens) - len(run) + 1))
