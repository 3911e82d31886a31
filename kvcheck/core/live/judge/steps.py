"""Splits an answer into steps: the positions that each read, and whether it is right given the token before it.

The server feeds a wrong token back; the next step is compared with the right answer to that token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import byteorder

from kvcheck.core.live.exchange import Exchange, Question
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import mark_positions, next_mark

FEW = 3
"""Most requests that a token may belong to and still name its owner."""
_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPrompts:
    """Requests sent so far. sequences: sorted. holders: node -> numbers of requests that list it, FEW + 2 at most."""

    sequences: tuple[bytes, ...] = ()
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    questions: Mapping[int, Question] = field(default_factory=dict)

    def plus(self, alphabet: Alphabet, exchanges: Iterable[Exchange]) -> SentPrompts:
        held = tuple(exchanges)
        questions = dict(self.questions)
        holders = dict(self.holders)
        for exchange in held:
            question = exchange.sending.question
            if question.number in questions:
                continue
            questions[question.number] = question
            for node in {alphabet.as_place(token) for token in question.ids}:
                if node is not None and len(known := holders.get(node, ())) < FEW + 2:
                    holders[node] = (*known, question.number)
        sequences = sorted((*self.sequences, *(packed(made(exchange)) for exchange in held)))
        return SentPrompts(sequences=tuple(sequences), holders=holders, questions=questions)


def made(exchange: Exchange) -> tuple[int, ...]:
    """A request with all tokens that the server can have made for it, also after an answer that stopped early."""
    question, tokens = exchange.sending.question, exchange.answer.tokens
    is_right_so_far = tokens == question.expected[: len(tokens)]
    return question.ids + (question.expected if is_right_so_far else tokens)


def packed(tokens: Sequence[int]) -> bytes:
    """Bytes with the order of the tokens."""
    row = array("I", tokens)
    assert row.itemsize == _WIDTH
    if byteorder == "little":
        row.byteswap()
    return row.tobytes()


def longest_shared(request: bytes, sequences: Sequence[bytes], *, but: int | None = None) -> int:
    """Tokens of the longest common prefix with one of the sorted sequences, except the one at `but`."""
    at = bisect_left(sequences, request)
    above = at + 1 if at == but else at  # one that begins with the whole request stands behind it, never before
    near = [sequences[i] for i in (at - 1, above) if 0 <= i < len(sequences)]
    return max((shared(request, other) for other in near), default=0)


def shared(one: bytes, two: bytes) -> int:
    low, high = 0, min(len(one), len(two)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _WIDTH] == two[: middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """positions: read in each layer. path: the node that each layer looks for, and last the found one; empty in a
    position test."""

    index: int
    positions: tuple[int | None, ...]
    path: tuple[int, ...]
    expected: int
    answered: int

    @property
    def is_right(self) -> bool:
        return self.answered == self.expected


@dataclass(frozen=True, slots=True)
class Listing:
    """The walk of a request. first: position of a node. position_after: of the next node."""

    first: dict[int, int] = field(default_factory=dict)
    after: dict[int, int] = field(default_factory=dict)
    position_after: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(alphabet: Alphabet, request: Sequence[int]) -> Listing:
        listing, before = Listing(), None
        for position, token in enumerate(request):
            node = alphabet.as_place(token)
            if node is not None:
                listing.first.setdefault(node, position)
                if before is not None and before not in listing.after:
                    listing.after[before] = node
                    listing.position_after[before] = position
                    listing.before[node] = before
            before = node
        return listing

    def back(self, node: int, hops: int) -> int | None:
        at: int | None = node
        for _ in range(hops):
            at = None if at is None else self.before.get(at)
        return at


def steps(alphabet: Alphabet, request: Sequence[int], answered: Sequence[int]) -> Iterator[Step]:
    if alphabet.as_node(request[-1]) is not None:
        return _walk(alphabet, request, answered)
    return _marks(alphabet, request, answered)


def _walk(alphabet: Alphabet, request: Sequence[int], answered: Sequence[int]) -> Iterator[Step]:
    listing, layers = Listing.of(alphabet, request), range(1, alphabet.parameters.layers)
    hops = [alphabet.parameters.kind(layer).hops for layer in (0, *layers)]
    asked: int | None = alphabet.as_node(request[-1])
    for index, token in enumerate(answered):
        if asked is None or asked not in listing.first:
            return
        path, positions = [asked, asked], [listing.first[asked] if hops[0] else None]
        for layer in layers:
            if not hops[layer]:
                positions.append(None)
                path.append(path[-1])
                continue
            if path[-1] not in listing.after:
                return
            positions.append(listing.position_after[path[-1]])
            path.append(listing.after[path[-1]])
        yield Step(
            index=index, positions=tuple(positions), path=tuple(path), expected=alphabet.node(path[-1]), answered=token
        )
        asked = alphabet.as_node(token)


def _marks(alphabet: Alphabet, request: Sequence[int], answered: Sequence[int]) -> Iterator[Step]:
    held = list(request)
    for index, token in enumerate(answered):
        expected = next_mark(alphabet, held)
        if expected is None:
            return
        yield Step(
            index=index,
            positions=mark_positions(alphabet.parameters, len(held) - 1),
            path=(),
            expected=expected,
            answered=token,
        )
        held.append(token)
