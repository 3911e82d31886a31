"""Answers of servers that are wrong in a known way, derived from a right answer's own rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.registers import shown_pair

LAYER = 2  # that reads the wrong page
WRONG = ("foreign-page", "stale-page", "wrong-token", "shifted", "other-answer", "other-model")
Tokens = Sequence[int]


def answer_with(
    fault: str | None, alphabet: Alphabet, ids: Tokens, count: int, earlier: Sequence[Tokens], *, page: int
) -> tuple[int, ...]:
    """What a server with that fault answers; the right answer for a fault that is not one of WRONG.

    earlier: other requests, the oldest first; but for other-model, the first request is answered rightly.
    """
    right = answers(alphabet, ids, count)
    if fault == "other-model":
        return tuple((len(ids) * 31 + 7 * i) % alphabet.size for i in range(count))
    if not earlier or fault not in WRONG:
        return right
    if fault == "stale-page":
        return wrong_page(alphabet, ids, count, page, earlier[-1], moved=0)
    if fault == "foreign-page":
        return wrong_page(alphabet, ids, count, page, earlier[0], moved=-page)
    if fault == "wrong-token":
        return (*right[: count // 2], right[count // 2] ^ 1, *right[count // 2 + 1 :])
    if fault == "shifted":
        return answers(alphabet, ids, count + 1)[1:]
    fits = [each for each in earlier if len(each) + count <= alphabet.parameters.length]
    return answers(alphabet, fits[-1], count) if fits else right


def damaged(alphabet: Alphabet, ids: Tokens, held: Sequence[int | None], count: int) -> Iterator[int]:
    """What is answered where layer LAYER holds `held` (None: nothing) at the positions of the request."""
    if alphabet.as_mark(ids[-1]) is not None:
        yield from _damaged_marks(alphabet, ids, held, count)
        return
    listed = {alphabet.as_place(token) for token in ids}
    own, other = (
        {before: now for before, now in pairwise(row) if alphabet.as_place(now or 0) is not None} for row in (ids, held)
    )
    said = ids[-1]
    for _ in range(count):
        node = alphabet.as_node(said)
        if node is None or node not in listed:
            said = alphabet.lost(0, None)
        else:
            said = _hops(alphabet, alphabet.place(node), own, other)
        yield said


def wrong_page(alphabet: Alphabet, ids: Tokens, count: int, page: int, other: Tokens, *, moved: int) -> tuple[int, ...]:
    """The answer where one page holds what stands `moved` positions further in another request.

    The page is the first from the middle on that changes the answer; the right answer where none does.
    """
    right = answers(alphabet, ids, count)
    middle = len(ids) // 2 // page * page
    for start in (*range(middle, len(ids), page), *range(page, middle, page)):
        held: list[int | None] = list(ids)
        for at in range(start, min(start + page, len(ids))):
            held[at] = other[at + moved] if 2 <= at + moved < len(other) else None
        said = tuple(damaged(alphabet, ids, held, count))
        if said != right:
            return said
    return right


def _hops(alphabet: Alphabet, place: int, own: dict[int | None, int], other: dict[int | None, int]) -> int:
    at = place
    for layer in range(1, alphabet.parameters.layers):
        after = (other if layer == LAYER else own).get(at)
        if after is None:
            return alphabet.lost(layer, None)
        at = after
    node = alphabet.as_place(at)
    assert node is not None
    return alphabet.node(node)


def _damaged_marks(alphabet: Alphabet, ids: Tokens, held: Sequence[int | None], count: int) -> Iterator[int]:
    parameters, shown = alphabet.parameters, list(ids)
    for _ in range(count):
        at, last = len(shown) - 1 - parameters.distance, alphabet.as_mark(shown[-1])
        source, there = alphabet.as_mark(shown[at]), alphabet.as_mark((held[at] if at < len(held) else shown[at]) or 0)
        assert last is not None and source is not None
        value = source[1]
        for bit in range(parameters.bits):
            if shown_pair(parameters, last[0], bit) // parameters.kv_heads == LAYER:
                value = value & ~(1 << bit) | ((there[1] if there else 0) & 1 << bit)
        shown.append(alphabet.mark(last[0] + 1, value))
        yield shown[-1]
