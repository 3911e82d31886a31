"""The right answer to a request, computed from its tokens alone.

The walk: a prompt lists the places of a closed walk. The answer to a node is the node `hops` further along. Each token
of an answer reads one position in each layer.

The position test: a request is a list of marks. The mark after the last one has the next phase, and the value
`distance` before the last one; each bit uses the distance of its layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.parameters import Parameters, shown_pair


@dataclass(frozen=True, slots=True)
class Reads:
    """Positions that one token of an answer depends on: [layers]; None for a layer that it does not read.

    Layer 0 may find the first place of a walk, which the prompt lists twice, at either position.
    """

    positions: tuple[int | None, ...]


def walk_prompt(alphabet: Alphabet, nodes: Sequence[int], start: int) -> tuple[int, ...]:
    """Tokens of a walk over `nodes`, with nodes[start] as the question.

    Raises UsageError if a node occurs twice, or if positions would stay unread (`hops` not coprime).
    """
    hops = alphabet.parameters.hops
    if len(set(nodes)) != len(nodes) or len(nodes) < 2:
        raise UsageError(
            f"a walk lists at least two nodes, each once; got {len(nodes)} with {len(set(nodes))} different ones"
        )
    if gcd(len(nodes), hops) != 1:
        raise UsageError(
            f"{len(nodes)} nodes and {hops} hops a token share a factor: parts of the walk would not be read"
        )
    return (*HEADER, *(alphabet.place(node) for node in nodes), alphabet.place(nodes[0]), alphabet.node(nodes[start]))


def mark_prompt(alphabet: Alphabet, values: Sequence[int], phase: int) -> tuple[int, ...]:
    """Tokens of a position test: one mark a value, phases counted up from `phase`. Raises UsageError."""
    farthest = alphabet.parameters.farthest
    if len(values) <= farthest:
        raise UsageError(f"a position test has more than {farthest} marks; got {len(values)}")
    return (*HEADER, *(alphabet.mark(phase + i, value) for i, value in enumerate(values)))


def draw_nodes(alphabet: Alphabet, rng: Rng, count: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    left = [node for node in range(alphabet.parameters.nodes) if node not in but]
    if count > len(left):
        raise UsageError(f"{count} nodes asked of a model that has {len(left)} left; make one with more --nodes")
    for i in range(count):
        other = i + rng.below(len(left) - i)
        left[i], left[other] = left[other], left[i]
    return left[:count]


def answers(alphabet: Alphabet, request: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` tokens that follow a request. Raises UsageError if they are not unique."""
    return tuple(token for token, _ in _steps(alphabet, request, count))


def reads(alphabet: Alphabet, request: Sequence[int], count: int) -> tuple[Reads, ...]:
    return tuple(read for _, read in _steps(alphabet, request, count))


def _steps(alphabet: Alphabet, request: Sequence[int], count: int) -> Iterator[tuple[int, Reads]]:
    if tuple(request[: len(HEADER)]) != HEADER or len(request) <= len(HEADER):
        raise UsageError(f"a request begins with the tokens {HEADER} and asks something; got {list(request[:4])} ...")
    longest = alphabet.parameters.length
    if len(request) + count > longest:
        raise UsageError(f"request and answer are at most {longest} tokens long; got {len(request)} + {count}")
    if alphabet.as_node(request[-1]) is not None:
        return _walk(alphabet, request, count)
    if alphabet.as_mark(request[-1]) is not None:
        return _marks(alphabet, request, count)
    raise UsageError(f"the last token of a request is a node or a mark; got {request[-1]}")


def _walk(alphabet: Alphabet, request: Sequence[int], count: int) -> Iterator[tuple[int, Reads]]:
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    position_after: dict[int, int] = {}
    for position, token in enumerate(request):
        node = alphabet.as_place(token)
        if node is None:
            continue
        first.setdefault(node, position)
        before = alphabet.as_place(request[position - 1])
        if before is not None:
            if after.setdefault(before, node) != node:
                raise UsageError(f"node {before} is followed by two nodes; its successor is not known")
            position_after.setdefault(before, position)
    node = alphabet.as_node(request[-1])
    hopping, layers = alphabet.parameters.hopping, alphabet.parameters.layers
    for _ in range(count):
        assert node is not None
        if node not in first:
            raise UsageError(f"the request asks for node {node}, which it does not list")
        path: list[int | None] = [None] * layers
        if alphabet.parameters.kind(0).hops:
            path[0] = first[node]
        for layer in hopping:
            if node not in after:
                raise UsageError(f"the walk ends at node {node}; a walk closes with the node that it begins with")
            path[layer] = position_after[node]
            node = after[node]
        yield alphabet.node(node), Reads(tuple(path))


def _marks(alphabet: Alphabet, request: Sequence[int], count: int) -> Iterator[tuple[int, Reads]]:
    held = list(request)
    for _ in range(count):
        token = next_mark(alphabet, held)
        if token is None:
            raise UsageError(f"a token that the mark at position {len(held) - 1} reads is not a mark")
        positions = mark_positions(alphabet.parameters, len(held) - 1)
        held.append(token)
        yield token, Reads(positions)


def mark_positions(parameters: Parameters, position: int) -> tuple[int | None, ...]:
    return tuple(None if back is None else position - back for back in _distances(parameters))


def next_mark(alphabet: Alphabet, held: Sequence[int]) -> int | None:
    last = alphabet.as_mark(held[-1])
    if last is None:
        return None
    value = 0
    for distance, bits in _bits_by_distance(alphabet.parameters, last[0]):
        source = alphabet.as_mark(held[-1 - distance]) if distance < len(held) else None
        if source is None:
            return None
        value |= source[1] & bits
    return alphabet.mark(last[0] + 1, value)


@cache
def _distances(parameters: Parameters) -> tuple[int | None, ...]:
    layers = range(parameters.layers)
    return tuple(parameters.distance_of(layer) if parameters.kind(layer).shows else None for layer in layers)


@cache
def _bits_by_distance(parameters: Parameters, phase: int) -> tuple[tuple[int, int], ...]:
    """(distance, mask of bits) shown after a mark of that phase."""
    masks: dict[int, int] = {}
    for bit in range(parameters.bits):
        layer = parameters.showing[shown_pair(parameters, phase, bit) // parameters.kv_heads]
        distance = parameters.distance_of(layer)
        masks[distance] = masks.get(distance, 0) | 1 << bit
    return tuple(masks.items())
