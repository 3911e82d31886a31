"""Questions: requests drawn from seeds, each with its one right answer.

Invariants:
- Other names give the same shared prefixes and lengths with other tokens at every place.
- Two walks share only the places of a common beginning while the alphabet has unused ones, so a page of another walk
  has no second key for a place of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question
from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.answers import answers, draw_nodes, mark_prompt, walk_prompt

WALK_FRAME = len(HEADER) + 2
"""Tokens of a walk beside its places: the header, the place that closes it, and the node in question."""
SHORTEST = 24
MORE_MARKS = 8
STRIDE = 8
"""Most places that `cover` counts for a token: a page of 16 holds a place of each stride up to 8 hops."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The content of a request before names are assigned: nodes of a walk, or values of a position test."""

    values: tuple[int, ...]
    is_walk: bool = True

    def cut(self, length: int) -> Subject:
        return Subject(self.values[:length], self.is_walk)


class QuestionSource(Protocol):
    """A source of requests, with answers that are known (`Questions`) or not (`core.live.own.prompts`)."""

    longest: int

    @property
    def has_marks(self) -> bool:
        """Whether a position test fits into a request; required before `marks`."""

    def walk(self, rng: Rng, places: int, *, prefix: Subject | None = None) -> Subject:
        """Draw a subject of about `places` tokens. prefix: its beginning."""

    def marks(self, rng: Rng, *, prefix: Subject | None = None) -> Subject:
        """Draw a position test. prefix: its beginning."""

    def put(self, rng: Rng, subject: Subject, tokens: int, *, start: int | None = None) -> Question:
        """Make a question. tokens: of the answer, fewer if no more fit. start: place in the walk; None: drawn."""

    def again(self, rng: Rng, before: Question, tokens: int) -> Question:
        """Make the next turn of a conversation: the request, its answer, and another question."""

    def cover(self, subject: Subject) -> int:
        """Tokens of an answer that read the whole subject, or as much of it as is worth its time."""


class Questions:
    """Questions with known answers. names: selects the tokens for drawn nodes."""

    def __init__(self, alphabet: Alphabet, *, longest: int, names: int, first: int = 0) -> None:
        self.alphabet = alphabet
        parameters = alphabet.parameters
        self.longest = min(longest, parameters.length)
        if self.longest < SHORTEST + WALK_FRAME + 8:
            raise UsageError(f"a server of known answers takes at least 64 tokens; this one takes {self.longest}")
        self._next = first
        self._used: set[int] = set()
        draws = Rng(names)
        self._shift = draws.below(parameters.nodes)
        self._factor = _unit(draws, parameters.nodes)
        self._phase = draws.below(parameters.phases)
        self._masks = [draws.below(1 << parameters.bits) for _ in range(parameters.farthest + 1 + MORE_MARKS)]

    def walk(self, rng: Rng, places: int, *, prefix: Subject | None = None) -> Subject:
        parameters = self.alphabet.parameters
        shared = prefix.values if prefix is not None else ()
        most = min(self.longest - WALK_FRAME - 1, parameters.nodes)
        length = self._coprime(min(max(places, len(shared) + 2, SHORTEST), most))
        if parameters.nodes - len(self._used | set(shared)) < length - len(shared):
            self._used.clear()
        drawn = draw_nodes(self.alphabet, rng, length - len(shared), but=frozenset(shared) | self._used)
        self._used.update(drawn, shared)
        return Subject((*shared, *drawn))

    def marks(self, rng: Rng, *, prefix: Subject | None = None) -> Subject:
        """Draw a few marks more than the distance that the test reads back; no token reads earlier ones."""
        parameters = self.alphabet.parameters
        count = parameters.farthest + 1 + rng.below(MORE_MARKS)
        shared = prefix.values[: count - 1] if prefix is not None else ()
        drawn = (rng.below(1 << parameters.bits) for _ in range(count - len(shared)))
        return Subject((*shared, *drawn), is_walk=False)

    @property
    def has_marks(self) -> bool:
        return self.alphabet.parameters.farthest + len(HEADER) + 2 * MORE_MARKS < self.longest

    def put(self, rng: Rng, subject: Subject, tokens: int, *, start: int | None = None) -> Question:
        drawn = rng.below(len(subject.values))
        if subject.is_walk:
            nodes = [self._name(value) for value in subject.values]
            ids = walk_prompt(self.alphabet, nodes, drawn if start is None else start)
        else:
            ids = mark_prompt(
                self.alphabet,
                [value ^ mask for value, mask in zip(subject.values, self._masks, strict=False)],
                self._phase,
            )
        return self._question(ids, min(tokens, self.longest - len(ids)))

    def again(self, rng: Rng, before: Question, tokens: int) -> Question:
        """Raises UsageError if no token fits or `before` is no walk."""
        listed = [node for node in map(self.alphabet.as_place, before.ids) if node is not None]
        ids = (*before.ids, *before.expected, self.alphabet.node(listed[rng.below(len(listed) - 1)]))
        return self._question(ids, max(1, min(tokens, self.longest - len(ids))))

    def cover(self, subject: Subject) -> int:
        """Read each page of 16 places of a walk in each layer; of a position test, all marks but the first few."""
        parameters = self.alphabet.parameters
        if not subject.is_walk:
            return parameters.farthest + 1
        return -(-len(subject.values) // min(parameters.hops, STRIDE)) + 1

    def _question(self, ids: tuple[int, ...], tokens: int) -> Question:
        question = Question(number=self._next, ids=ids, expected=answers(self.alphabet, ids, tokens))
        self._next += 1
        return question

    def _name(self, node: int) -> int:
        return (node * self._factor + self._shift) % self.alphabet.parameters.nodes

    def _coprime(self, length: int) -> int:
        hops = self.alphabet.parameters.hops
        return next(count for count in range(length, 1, -1) if gcd(count, hops) == 1)


def _unit(rng: Rng, modulus: int) -> int:
    while True:
        factor = 1 + rng.below(modulus)
        if gcd(factor, modulus) == 1:
            return factor
