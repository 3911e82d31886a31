"""Everything that a run has sent and received: possible cached prefixes, and owners of tokens.

Invariants:
- A sequence is a request with its answer, 4 bytes a token, most significant first, so the longest common prefix is that
  of a sorted neighbour.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import byteorder

from kvcheck.core.live.exchange import Exchange, Question
from kvcheck.core.model.alphabet import Alphabet

FEW = 3
"""Most requests that a token may belong to and still name its owner."""
_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Requests sent so far. sequences: sorted. holders: node -> numbers of requests that list it, FEW + 2 at most."""

    sequences: tuple[bytes, ...] = ()
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    questions: Mapping[int, Question] = field(default_factory=dict)

    def plus(self, alphabet: Alphabet, exchanges: Iterable[Exchange]) -> Sent:
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
        return Sent(sequences=tuple(sequences), holders=holders, questions=questions)


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
