"""What a right server answers, worked out from the tokens of a request alone.

The walk: a prompt lists the places of a closed walk. The answer to a node is the node `hops` further along the walk.
Each token of an answer reads one position in each layer; over n tokens every layer reads every position, where n and
hops share no factor.

The position test: a request is a list of marks. The mark after the last one has the value that stood `distance` back
from the last one, and the next phase.

Invariants:
- Only the tokens are read: no weight, no arithmetic of a model.
- A request whose answer is not unique is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.model.alphabet import HEADER, Alphabet


@dataclass(frozen=True, slots=True)
class Reads:
    """Positions that the token at one step of an answer depends on: position of the request by layer, [layers].

    A node that the prompt lists twice (the first place, which closes the walk) is found at either position in layer 0.
    """

    positions: tuple[int, ...]


def walk_prompt(alphabet: Alphabet, nodes: Sequence[int], start: int) -> tuple[int, ...]:
    """Tokens of a walk over `nodes`, asked for what comes after nodes[start].

    Raises UsageError where a node comes twice, or where the number of nodes shares a factor with the hops of a token:
    such a walk would leave positions unread.
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
    """Tokens of a position test: one mark a value, phases counted up from `phase`. At least `distance` + 1 values."""
    if len(values) <= alphabet.parameters.distance:
        raise UsageError(f"a position test has more than {alphabet.parameters.distance} marks; got {len(values)}")
    return (*HEADER, *(alphabet.mark(phase + i, value) for i, value in enumerate(values)))


def draw_nodes(alphabet: Alphabet, rng: Rng, count: int, *, but: frozenset[int] = frozenset()) -> list[int]:
    """`count` different nodes, none of `but`. Raises UsageError where the alphabet has too few."""
    left = [node for node in range(alphabet.parameters.nodes) if node not in but]
    if count > len(left):
        raise UsageError(f"{count} nodes asked of a model that has {len(left)} left; make one with more --nodes")
    for i in range(count):
        other = i + rng.below(len(left) - i)
        left[i], left[other] = left[other], left[i]
    return left[:count]


def answers(alphabet: Alphabet, request: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` tokens that follow a request.

    Raises UsageError where the request does not begin with the header, ends in a token that asks nothing, or leads to
    a token that its walk does not determine.
    """
    return tuple(token for token, _ in _steps(alphabet, request, count))


def reads(alphabet: Alphabet, request: Sequence[int], count: int) -> tuple[Reads, ...]:
    """What each of the `count` tokens after a request depends on. Raises as `answers` does."""
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
    for _ in range(count):
        assert node is not None
        if node not in first:
            raise UsageError(f"the request asks for node {node}, which it does not list")
        path = [first[node]]
        for _ in range(alphabet.parameters.hops):
            if node not in after:
                raise UsageError(f"the walk ends at node {node}; a walk closes with the node that it begins with")
            path.append(position_after[node])
            node = after[node]
        yield alphabet.node(node), Reads(tuple(path))


def _marks(alphabet: Alphabet, request: Sequence[int], count: int) -> Iterator[tuple[int, Reads]]:
    held = list(request)
    layers, distance = alphabet.parameters.layers, alphabet.parameters.distance
    for _ in range(count):
        last = alphabet.as_mark(held[-1])
        position = len(held) - 1 - distance
        source = alphabet.as_mark(held[position]) if position >= 0 else None
        if last is None or source is None:
            raise UsageError(f"the token {distance} before position {len(held) - 1} is not a mark")
        token = alphabet.mark(last[0] + 1, source[1])
        held.append(token)
        yield token, Reads((position,) * layers)
