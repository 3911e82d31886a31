"""Single faults of a cache that explain all wrong tokens of an answer.

    a page of a layer       foreign, stale, zeroed, shifted or of a wrong scale. Keys: a step that reads it is lost
                            there. Values: in the next layer; in the last one <little> or <much>. Marks: its bits
    a page of all layers    marks: bits of several layers in one step; likewise a layer in all pages
    keys too strong         a page of a layer with twice their strength or more wins the lookups of every step. With
                            the header: each step that reads another page is lost there
    the whole context       another request's from some token on: nothing is found, or nodes that it lists
    a second key            another request's page holds a node that a step looks for: a layer is lost, or <little>

Invariants:
- A fault that is left out contradicts a step, if it was present before the second token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import cos
from operator import eq

from kvcheck.core.live.judge.steps import Listing, Step
from kvcheck.core.live.judge.verdicts import ServerSetting
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.model.parameters import Parameters, node_digits, shown_pair

MANY_BITS = 8
"""Bits of another context that are all right once in 256 times."""
LEAST_TIMES, NEAR_NATS = 2.0, 20.0
"""Least factor of keys that are too strong; keys whose scores are nearer than NEAR_NATS share a lookup."""

Where = tuple[int | None, int | None]
"""(layer, page) of a fault; None: each of them."""
CONTEXT: Where = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The common layer and page of all faults that explain an answer. why: the reason if there is neither."""

    layer: int | None = None
    page: int | None = None
    why: str | None = None

    def text(self, page_tokens: int) -> str:
        if self.page is None:
            return "" if self.layer is None else f"; it points to layer {self.layer}, and to no single page"
        positions = f"(positions {self.page * page_tokens} to {(self.page + 1) * page_tokens - 1})"
        if self.layer is None:
            return f"; it points to page {self.page} {positions}, and to no single layer"
        return f"; it points to layer {self.layer}, page {self.page} {positions}"


def agreed(faults: Collection[Where]) -> Named:
    if not faults:
        return Named(why="no single fault of a page explains all of its wrong tokens")
    layers, pages = ({each[at] for each in faults} for at in (0, 1))
    layer, page = (each.pop() if len(each) == 1 else None for each in (layers, pages))
    if layer is not None or page is not None:
        return Named(layer=layer, page=page)
    if CONTEXT in faults:
        return Named(why="all of its context can be another request's from there on")
    shown = sorted(f"page {page}" + ("" if layer is None else f" of layer {layer}") for layer, page in faults)
    return Named(why=f"{shown[0]} and {shown[-1]} explain it alike")


def explanations(
    setting: ServerSetting,
    ids: Sequence[int],
    answered: Sequence[int],
    taken: Sequence[Step],
    has_second_key: Callable[[int, int], bool],
    cuts: Collection[int],
) -> frozenset[Where]:
    """Places of faults that explain all wrong steps and contradict no right one.

    has_second_key: whether another request lists a node with a successor other than this. cuts: lengths of the prefixes
    shared with other requests.
    """
    if all(step.is_right for step in taken):
        return frozenset()
    is_walk = setting.alphabet.as_node(ids[-1]) is not None
    return (_Walk if is_walk else _Marks)(setting, ids, answered, taken, has_second_key, cuts).explanations()


def layer_before(alphabet: Alphabet, layer: int) -> int | None:
    reading = [each for each in range(layer) if alphabet.parameters.kind(each).hops]
    return reading[-1] if reading else None


def strayed(alphabet: Alphabet, listing: Listing, step: Step) -> Iterator[tuple[int, int]]:
    """(layer, node) of each wrong hop that leads to the answered node."""
    answered, hopping = alphabet.as_node(step.answered), alphabet.parameters.hopping
    for layer in range(hopping[-1] + 1):
        if answered is None or step.positions[layer] is None:
            continue
        found = listing.back(answered, sum(each > layer for each in hopping))
        if found is not None and found != step.path[layer + 1]:
            yield layer, found


def shown_by(alphabet: Alphabet, expected: int) -> list[tuple[int, int]]:
    """(layer, head) of each bit of a mark."""
    mark, parameters = alphabet.as_mark(expected), alphabet.parameters
    assert mark is not None
    phase = (mark[0] - 1) % parameters.phases
    pairs = [divmod(shown_pair(parameters, phase, bit), parameters.kv_heads) for bit in range(parameters.bits)]
    return [(parameters.showing[number], head) for number, head in pairs]


def is_moved(alphabet: Alphabet, step: Step) -> bool:
    said, right = alphabet.as_mark(step.answered), alphabet.as_mark(step.expected)
    return said is not None and right is not None and said[0] != right[0]


def wrong_bits(alphabet: Alphabet, step: Step) -> dict[int, set[int]]:
    """Layer -> heads of wrong bits; empty unless the answer is a mark of the right phase."""
    said, right = alphabet.as_mark(step.answered), alphabet.as_mark(step.expected)
    wrong: dict[int, set[int]] = {}
    if said is None or right is None or is_moved(alphabet, step):
        return wrong
    for bit, (layer, head) in enumerate(shown_by(alphabet, step.expected)):
        if (said[1] ^ right[1]) >> bit & 1:
            wrong.setdefault(layer, set()).add(head)
    return wrong


@dataclass(frozen=True)
class _Answer:
    setting: ServerSetting
    ids: Sequence[int]
    answered: Sequence[int]
    taken: Sequence[Step]
    has_second_key: Callable[[int, int], bool]
    cuts: Collection[int]

    @property
    def alphabet(self) -> Alphabet:
        return self.setting.alphabet

    @property
    def parameters(self) -> Parameters:
        return self.setting.alphabet.parameters

    @cached_property
    def wrong(self) -> list[Step]:
        return [step for step in self.taken if not step.is_right]

    @cached_property
    def right(self) -> list[Step]:
        """Without the first: its token comes from prefill, which may not have read the cache."""
        return [step for step in self.taken if step.is_right and step.index]

    def explanations(self) -> frozenset[Where]:
        # A step that reads a wrong page is wrong, so a right step that read it refutes the fault, unless another
        # request begins alike up to the middle of that page.
        rows = [row for step in self.wrong if (row := self.pages(step)) is not None]
        found = (set.intersection(*rows) if rows else set()) - self.read_right()
        if found or len(self.wrong) > 1:  # one step can be won by some page of many by chance
            found |= set(self.elsewhere())
        lost = self.alphabet.lost_at(self.wrong[0].answered)
        if found and lost is not None and all(self.at(step, lost[0]) == {(lost[0], 0)} for step in self.right):
            found.add((lost[0], 0))  # the header's keys win all lookups but those of their own page
        one = {where for where in found if None not in where}
        found -= {wider for layer, page in one for wider in ((None, page), (layer, None))}
        return frozenset(found | ({CONTEXT} if self.may_be_of_another(found) else set()))

    def tokens_of(self, page: int, held: Sequence[int]) -> range:
        first = page * self.setting.page_tokens
        return range(first, min(first + self.setting.page_tokens, len(held)))

    def at(self, step: Step, layer: int) -> set[Where]:
        position = step.positions[layer]
        return set() if position is None else {(layer, position // self.setting.page_tokens)}

    def each_page(self) -> range:
        return range(-(-(len(self.ids) + len(self.answered)) // self.setting.page_tokens))

    def pages(self, step: Step) -> set[Where] | None:
        """Pages whose damage makes this wrong step; None if it points to no page."""
        raise NotImplementedError

    def read_right(self) -> set[Where]:
        """Pages that a right step has read, and would have been wrong with."""
        raise NotImplementedError

    def elsewhere(self) -> Iterator[Where]:
        """Pages at fault without being read: their keys are too strong, or second ones."""
        raise NotImplementedError

    def may_be_of_another(self, found: Collection[Where]) -> bool:
        """Whether the context can be another request's from the first wrong step on. found: other faults."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Walk(_Answer):
    @cached_property
    def listing(self) -> Listing:
        return Listing.of(self.alphabet, self.ids)

    @cached_property
    def twice(self) -> set[int]:
        places = Counter(self.alphabet.as_place(token) for token in self.ids)
        return {node for node, count in places.items() if node is not None and count > 1}

    def at(self, step: Step, layer: int) -> set[Where]:
        """Of a node listed twice, layer 0 reads both places."""
        if layer or step.path[0] not in self.twice:
            return super().at(step, layer)
        place = self.alphabet.place(step.path[0])
        return {(0, at // self.setting.page_tokens) for at, token in enumerate(self.ids) if token == place}

    def read_right(self) -> set[Where]:
        read = [(at, self.at(step, layer)) for step in self.right for layer, at in enumerate(step.positions)]
        return set[Where]().union(*(pages for at, pages in read if len(pages) == 1 and at not in self.shared))

    @cached_property
    def shared(self) -> set[int]:
        """Positions of pages that another request shares in part: right there, and wrong behind."""
        size = self.setting.page_tokens
        return {at for cut in self.cuts for at in range(cut // size * size, cut)}

    def lost_layer(self, step: Step) -> int | None:
        lost = self.alphabet.lost_at(step.answered)
        return lost[0] if lost is not None and (lost[1] is None or self.parameters.kv_heads == 1) else None

    def is_foreign(self, step: Step) -> bool:
        node = self.alphabet.as_node(step.answered)
        return node is not None and node not in self.listing.first

    def misled(self, step: Step) -> list[int]:
        """Layers that can have returned a wrong value, so that a later one or the answer is wrong."""
        hopping = self.parameters.hopping
        if step.answered in (TOO_LITTLE, TOO_MUCH):
            return [*hopping[-2:]]
        if (layer := self.lost_layer(step)) is not None:
            earlier = layer_before(self.alphabet, layer)
            return [] if earlier is None else [earlier]
        return [layer for layer, _ in strayed(self.alphabet, self.listing, step)]

    def pages(self, step: Step) -> set[Where]:
        if step.answered in (TOO_LITTLE, TOO_MUCH) or self.is_foreign(step):
            return self.at(step, self.parameters.hopping[-1])
        lost = self.alphabet.lost_at(step.answered)
        layers = [*self.misled(step), *(() if lost is None else (lost[0],))]
        return set[Where]().union(*(self.at(step, layer) for layer in layers))

    def elsewhere(self) -> Iterator[Where]:
        first = self.wrong[0]
        misled = [layer for layer in self.misled(first) if not self.parameters.kind(layer).is_state]
        for layer in misled:
            finds_two = layer == misled[-1] != 0 and self.alphabet.as_node(first.answered) is None
            finds_two = finds_two and self.has_second_key(*first.path[layer : layer + 2])
            yield from ((layer, page) for page in self.each_page() if finds_two or self.is_won(layer, page))

    def is_won(self, layer: int, page: int) -> bool:
        """Whether keys of this page, too strong in the same heads, explain each step."""
        heads = set(range(self.parameters.kv_heads))
        for step in self.right:
            heads -= self.won(step, layer, page)
            if not heads:
                return False
        return all(layer in self.misled(step) and heads & self.won(step, layer, page) for step in self.wrong)

    def won(self, step: Step, layer: int, page: int) -> set[int]:
        """Heads with a wrong value if the best-matching keys of this page win."""
        asked, right = (node_digits(self.parameters, node) for node in step.path[layer : layer + 2])
        best, found = -1, list[tuple[int, ...]]()
        for at in self.tokens_of(page, self.ids):
            value = self.alphabet.as_place(self.ids[at])
            key = self.alphabet.as_place(self.ids[at - 1]) if layer else value
            if value is None:
                continue
            digits = () if key is None else node_digits(self.parameters, key)
            alike = sum(map(eq, asked, digits))
            if alike >= best:
                best, found = alike, [*(found if alike == best else ()), node_digits(self.parameters, value)]
        heads = self.parameters.kv_heads
        return {digit % heads for each in found for digit in range(len(right)) if each[digit] != right[digit]}

    def may_be_of_another(self, found: Collection[Where]) -> bool:
        first = self.wrong[0]
        if any(step.index > first.index for step in self.right):
            return False
        if (layer := self.lost_layer(first)) is not None:
            position = first.positions[layer]
            return position is not None and all(at is None or at > position for at in first.positions[:layer])
        if self.is_foreign(first):  # the whole context holds a place of that node, a page of another request does not
            return all(self.alphabet.as_node(token) is not None for token in self.answered[first.index + 1 :][:1])
        return self.alphabet.as_node(first.answered) is not None


@dataclass(frozen=True)
class _Marks(_Answer):
    def pages(self, step: Step) -> set[Where] | None:
        if step.answered in (TOO_LITTLE, TOO_MUCH):
            return None
        lost = self.alphabet.lost_at(step.answered)
        layers = [*wrong_bits(self.alphabet, step)] if lost is None else [lost[0]]
        places = set[Where]().union(*(self.at(step, layer) for layer in layers))
        one = {(layers[0], None), *places} if len(layers) == 1 else set[Where]()
        return one | {(None, page) for _, page in places}

    def read_right(self) -> set[Where]:
        """Empty: bits of another request are right by chance."""
        return set()

    def elsewhere(self) -> Iterator[Where]:
        layers = {layer for step in self.wrong for layer in wrong_bits(self.alphabet, step)}
        for layer in layers if len(layers) == 1 else ():
            yield from ((layer, page) for page in self.each_page() if self.is_won(layer, page))

    def is_won(self, layer: int, page: int) -> bool:
        heads, wrong = set(range(self.parameters.kv_heads)), set[int]()
        for step in (*self.wrong, *self.right):
            seen = wrong_bits(self.alphabet, step).get(layer, set())
            sure, possible = self.won(step, layer, page)
            if not seen <= possible:
                return False
            if self.alphabet.as_mark(step.answered) is not None:
                heads -= sure - seen
                wrong |= seen
        return wrong <= heads

    def won(self, step: Step, layer: int, page: int) -> tuple[set[int], set[int]]:
        """Heads whose bits are wrong for sure, and perhaps, if the best keys of this page win."""
        held, target = (*self.ids, *self.answered[: step.index]), step.positions[layer]
        bits = [(bit, head) for bit, (at, head) in enumerate(shown_by(self.alphabet, step.expected)) if at == layer]
        if target is None or not bits or self.at(step, layer) == {(layer, page)}:
            return set(), set()
        first = len(held) - self.parameters.window if self.parameters.kind(layer).is_windowed else 0
        read = [(at, self.alphabet.as_mark(held[at])) for at in self.tokens_of(page, held) if at >= first]
        scored = [(position_nats(self.parameters, target - at), mark[1]) for at, mark in read if mark is not None]
        most = max((nats for nats, _ in scored), default=0.0)
        right = self.alphabet.as_mark(step.expected)
        assert right is not None
        wrong = [
            {head for bit, head in bits if (value ^ right[1]) >> bit & 1}
            for nats, value in scored
            if LEAST_TIMES * (most - nats) < NEAR_NATS
        ]
        is_sure = LEAST_TIMES * most - position_nats(self.parameters, 0) > NEAR_NATS
        return set.intersection(*wrong) if wrong and is_sure else set(), set().union(*wrong)

    def may_be_of_another(self, found: Collection[Where]) -> bool:
        """False if many bits are right that the other faults do not touch."""
        first = self.wrong[0]
        steps = [step for step in self.taken if step.index >= first.index and self.alphabet.as_mark(step.answered)]
        shown = [(at, step) for step in steps for at, _ in shown_by(self.alphabet, step.expected)]
        left_alone = [
            sum(at != layer if layer is not None else (at, page) not in self.at(step, at) for at, step in shown)
            for layer, page in found
        ]
        return bool(wrong_bits(self.alphabet, first)) and max(left_alone, default=0) < MANY_BITS


@cache
def position_nats(parameters: Parameters, displacement: int) -> float:
    slots = FAMILIES.load(parameters.family).slots(parameters)
    turned = zip(slots.rotary.weights, slots.rotary.frequencies, strict=True)
    return slots.position_nats * sum(weight * cos(frequency * displacement) for weight, frequency in turned)
