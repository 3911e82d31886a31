"""Ranks the pages of layers that a wrong answer points to, most likely first.

Each wrong step names pages that it read, with a weight; the sum over the wrong steps ranks them. Weights of requests
that share all tokens up to the end of a page are added. Of equal weights the lower layer comes first, since its damage
is carried on.

Invariants:
- Only pages are named that a wrong step read, or that hold a second key for its lookup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvcheck.core.live.exchange import Question
from kvcheck.core.live.judge.faults import (
    CONTEXT,
    Named,
    Where,
    agreed,
    explanations,
    is_moved,
    layer_before,
    shown_by,
    strayed,
    wrong_bits,
)
from kvcheck.core.live.judge.steps import FEW, Listing, Step
from kvcheck.core.live.judge.verdicts import PagePlace, ServerSetting
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet

# Damaged values before a lost layer are less likely than damaged keys; every head would miss them, so with a single
# lost head they are unlikely. Two keys of one node: another request lists the node that a layer looks for, with
# another node after it. If the page there is that request's, both keys match and the layer returns half of each.
# Requests of the same round come first; the weight is divided by the requests that list it, and is 0 for more than
# FEW, since of many one always does. A state has no pages and no second key: another request's state holds the other
# entry alone, so it adds little. READ_RIGHT: a wrong page is mostly wrong as a whole, so a right step that read it
# halves the weight; but one token can be wrong, and damage can come after the step. The first token is no such step:
# prefill may not have read the cache.
SURE = 1.0  # keys of a lost layer; values of the last layer at <little> or <much>; bits that differ
VALUES_BEFORE = 0.6  # of the layer before a lost one
VALUES_BEFORE_ONE_HEAD = 0.1  # the same, if one head alone is lost
IN_PREFILL = 0.3  # layer 0 at the page of a lost layer's keys, which prefill made from it
ONE_OF_SEVERAL = 0.5  # each layer that can have led to another node, or shows a mark at <little> or <much>
TWO_KEYS_LOST = 0.55  # at the layer before a lost one
TWO_KEYS_LITTLE = 1.1  # at the last layer, at <little> or <much>
ENTRY_IN_ANOTHER_STATE = 0.1
READ_RIGHT = 0.5
MOST_LISTED = 16
MOST_PLACES = 6


@dataclass(frozen=True, slots=True)
class Listed:
    after: int
    position: int
    request: int
    is_of_round: bool


Lists = Mapping[int, tuple[Listed, ...]]
"""Node -> its entries in requests; the first MOST_LISTED that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A wrong step's evidence against one layer. heads: empty if none in particular."""

    layer: int
    position: int
    weight: float
    why: str
    heads: frozenset[int] = frozenset()
    is_values_before: bool = False


@dataclass(slots=True)
class Suspicion:
    """by_itself: False if only a later layer was lost, which its values may have misled."""

    weight: float = 0.0
    by_itself: bool = False
    heads: frozenset[int] | None = None
    why: list[str] = field(default_factory=list)

    def add(self, weight: float, heads: frozenset[int], why: str) -> None:
        self.weight += weight
        self.heads = heads if self.heads is None else self.heads | heads if self.heads and heads else frozenset()
        if why not in self.why:
            self.why.append(why)


@dataclass(frozen=True, slots=True)
class Suspects:
    """faults: places of single faults that explain the answer. read: by wrong steps. was_right: a step that read the
    cache is right."""

    question: Question
    by_page: dict[tuple[int, int], Suspicion]
    faults: frozenset[Where]
    read: frozenset[tuple[int, int]]
    was_right: bool
    is_moved: bool

    def prefix(self, page: int, page_tokens: int) -> tuple[int, ...]:
        return self.question.ids[: (page + 1) * page_tokens]


def lists(alphabet: Alphabet, *, of_round: Sequence[Question], earlier: Sequence[Question]) -> Lists:
    listed: dict[int, dict[tuple[int, int], Listed]] = {}
    for number, question in enumerate((*of_round, *earlier)):
        for position, (one, two) in enumerate(pairwise(question.ids), 1):
            before, after = alphabet.as_place(one), alphabet.as_place(two)
            if before is not None and after is not None:
                known = listed.setdefault(before, {})
                if len(known) < MOST_LISTED:
                    known.setdefault(
                        (after, position), Listed(after, position, question.number, number < len(of_round))
                    )
    return {node: tuple(known.values()) for node, known in listed.items()}


def suspects(
    setting: ServerSetting,
    question: Question,
    answered: Sequence[int],
    taken: Sequence[Step],
    listed: Lists,
    cuts: Collection[int],
) -> Suspects:
    hints = [hint for step in taken if not step.is_right for hint in _hints(setting.alphabet, question, step, listed)]
    right = {
        (layer, position // setting.page_tokens)
        for step in taken
        if step.is_right and step.index
        for layer in _shown_layers(setting.alphabet, step)
        if (position := step.positions[layer]) is not None
    }
    by_page: dict[tuple[int, int], Suspicion] = {}
    for hint in hints:
        key = hint.layer, hint.position // setting.page_tokens
        seen_right = key in right
        why = hint.why + (", though another step read that page right" if seen_right else "")
        share = READ_RIGHT if seen_right else 1.0
        suspicion = by_page.setdefault(key, Suspicion())
        suspicion.add(hint.weight * share, hint.heads, why)
        suspicion.by_itself = suspicion.by_itself or not hint.is_values_before

    def has_second_key(node: int, after: int) -> bool:
        return any(each.after != after for each in listed.get(node, ()))

    faults = explanations(setting, question.ids, answered, taken, has_second_key, cuts)
    read = frozenset(
        (layer, at // setting.page_tokens)
        for step in taken
        if not step.is_right
        for layer, at in enumerate(step.positions)
        if at is not None
    )
    was_right = any(step.is_right and step.index for step in taken)
    has_moved = any(is_moved(setting.alphabet, step) for step in taken)
    return Suspects(question, by_page, faults, read, was_right, has_moved)


def named(setting: ServerSetting, own: Suspects, round_suspects: Sequence[Suspects]) -> Named:
    """The layer and page common to all faults that explain an answer.

    If other wrong requests share a page that all of them read, only faults that explain each of them count.
    """
    if any(each.is_moved for each in round_suspects):
        return Named(why="a mark of another phase is made of values that are too strong, of whatever layer")
    others = [each for each in round_suspects if each.question.number != own.question.number]
    for page in sorted({page for _, page in own.read}):
        prefix = own.prefix(page, setting.page_tokens)
        same = [each for each in others if each.prefix(page, setting.page_tokens) == prefix]
        common = own.faults.intersection(*(each.faults for each in same))
        read = own.read.intersection(*(each.read for each in same))
        if same and any(where in read and where[1] == page for where in common):
            if sum(each.was_right for each in (own, *same)) > 1:
                common -= {CONTEXT}  # two contexts do not turn foreign just when both reach that page
            return agreed([where for where in common if where[1] is None or where[1] <= page])
    return agreed(own.faults)


def ranked(setting: ServerSetting, own: Suspects, round_suspects: Sequence[Suspects]) -> tuple[PagePlace, ...]:
    """The places of one request, with the weights of others in the round that share them."""
    places = []
    pointing: dict[tuple[int, int], int] = {}
    for (layer, page), suspicion in own.by_page.items():
        weight, why, also = suspicion.weight, "; ".join(suspicion.why), []
        lost_there = {own.question.number} if suspicion.by_itself else set()
        prefix = own.prefix(page, setting.page_tokens)
        for other in round_suspects:
            theirs = other.by_page.get((layer, page))
            is_other = other.question.number != own.question.number
            if theirs is not None and is_other and other.prefix(page, setting.page_tokens) == prefix:
                weight += theirs.weight
                also.append(other.question.number)
                lost_there |= {other.question.number} if theirs.by_itself else set()
        if also:
            why += f"; {len(also)} more wrong requests with the same tokens point to it, the first is {also[0]}"
        pointing[layer, page] = len(lost_there)
        heads = suspicion.heads or ()
        places.append(
            PagePlace(
                layer=layer,
                head=next(iter(heads)) if len(heads) == 1 else None,
                page=page,
                first=page * setting.page_tokens,
                last=(page + 1) * setting.page_tokens - 1,
                weight=weight,
                why=why,
            )
        )
    places = [_carried_on(place, places, pointing) for place in places]
    ordered = sorted(places, key=lambda place: (-place.weight, place.layer, place.page))
    return tuple(replace(place, weight=round(place.weight, 6)) for place in ordered[:MOST_PLACES])


def _carried_on(place: PagePlace, places: Sequence[PagePlace], pointing: Mapping[tuple[int, int], int]) -> PagePlace:
    """Raise layer 0 of a page above its later layers if it explains more wrong requests than each of them."""
    later = [other for other in places if other.page == place.page and other.layer]
    if place.layer or not later or pointing[0, place.page] <= max(pointing[each.layer, each.page] for each in later):
        return place
    return replace(place, weight=max(place.weight, *(each.weight + 0.01 for each in later)))


def _shown_layers(alphabet: Alphabet, step: Step) -> Iterable[int]:
    if step.path:
        return range(alphabet.parameters.layers)
    return {layer for layer, _ in shown_by(alphabet, step.expected)}


def _read(step: Step, layer: int) -> int:
    position = step.positions[layer]
    assert position is not None, f"layer {layer} reads nothing"
    return position


def _hints(alphabet: Alphabet, question: Question, step: Step, listed: Lists) -> Iterator[Hint]:
    lost = alphabet.lost_at(step.answered)
    if lost is not None and step.positions[lost[0]] is not None:
        before = layer_before(alphabet, lost[0])
        if step.path and before:
            yield from _two_keys(alphabet, question, step, before, listed)
        yield from _lost(alphabet, step, *lost)
        return
    yield from _other_node(alphabet, question, step, listed) if step.path else _other_mark(alphabet, step)


def _lost(alphabet: Alphabet, step: Step, layer: int, head: int | None) -> Iterator[Hint]:
    named = head if alphabet.parameters.kv_heads > 1 else None
    heads = frozenset() if named is None else frozenset({named})
    at = f"layer {layer}" if named is None else f"KV head {named} of layer {layer}"
    position = _read(step, layer)
    kind = alphabet.parameters.kind(layer)
    what = "does not hold as it should in its state what was written" if kind.is_state else "found nothing"
    why = f"{at} {what} at position {position}"
    if kind.is_windowed:
        why += ", the first one of its window, or something before it"
    yield Hint(layer=layer, position=position, weight=SURE, why=why, heads=heads)
    if layer and step.path:
        if named is None:
            yield Hint(
                layer=0,
                position=position,
                weight=IN_PREFILL,
                why=f"layer 0 may have read position {position} or the one before it wrongly in prefill",
            )
        before = layer_before(alphabet, layer)
        if before is not None:
            yield Hint(
                layer=before,
                position=_read(step, before),
                weight=VALUES_BEFORE if named is None else VALUES_BEFORE_ONE_HEAD,
                why=f"values of position {_read(step, before)} may have sent layer {layer} astray",
                is_values_before=True,
            )


def _other_node(alphabet: Alphabet, question: Question, step: Step, listed: Lists) -> Iterator[Hint]:
    last = alphabet.parameters.hopping[-1]
    position = _read(step, last)
    answered = alphabet.as_node(step.answered)
    if step.answered in (TOO_LITTLE, TOO_MUCH):
        why = f"values of the last layer contradict each other, or are too weak or too strong, at {position}"
        yield Hint(layer=last, position=position, weight=SURE, why=why)
        yield from _two_keys(alphabet, question, step, last, listed)
    if answered is None:
        return
    listing = Listing.of(alphabet, question.ids)
    if answered not in listing.first:
        why = f"the node that was answered is not in the request; the last layer read position {position}"
        yield Hint(layer=last, position=position, weight=SURE, why=why)
        return
    for layer, found in strayed(alphabet, listing, step):
        senders = [each.request for each in listed.get(step.path[layer], ()) if each.after == found and layer]
        sender = senders[0] if senders else None
        why = f"layer {layer} can have found node {found} instead of {step.path[layer + 1]}"
        yield Hint(
            layer=layer,
            position=_read(step, layer),
            weight=ONE_OF_SEVERAL if sender is None else SURE,
            why=why if sender is None else f"{why}, as request {sender} lists it",
        )


def _two_keys(alphabet: Alphabet, question: Question, step: Step, layer: int, listed: Lists) -> Iterator[Hint]:
    """Pages that, as another request's, hold a second key for a layer's lookup."""
    node, right = step.path[layer : layer + 2]
    is_state = alphabet.parameters.kind(layer).is_state
    found = [each for each in listed.get(node, ()) if each.after != right]
    found = [each for each in found if is_state or each.position < len(question.ids)]
    found = [each for each in found if each.is_of_round] or found
    if len(found) > FEW:
        return
    weight = TWO_KEYS_LITTLE if layer == alphabet.parameters.hopping[-1] else TWO_KEYS_LOST
    for each in found:
        own = f"request {each.request} lists node {node} too"
        yield Hint(
            layer=layer,
            position=_read(step, layer) if is_state else each.position,
            weight=(ENTRY_IN_ANOTHER_STATE if is_state else weight) / len(found),
            why=f"{own}; its state would lead to node {each.after}"
            if is_state
            else f"{own}; its page here would be a second key",
            is_values_before=is_state,
        )


def _other_mark(alphabet: Alphabet, step: Step) -> Iterator[Hint]:
    if step.answered in (TOO_LITTLE, TOO_MUCH):
        # A windowed layer returns TOO_MUCH at each mark if its values are too strong; no other layer ever does.
        windowed = alphabet.parameters.windowed if step.answered == TOO_MUCH else ()
        what = "too strong" if windowed else "too weak, or contradict each other,"
        for layer in windowed or sorted({layer for layer, _ in shown_by(alphabet, step.expected)}):
            position = _read(step, layer)
            why = f"bits of layer {layer} may be {what} at {position}"
            yield Hint(layer=layer, position=position, weight=ONE_OF_SEVERAL, why=why)
    for layer, which in wrong_bits(alphabet, step).items():
        names = ", ".join(map(str, sorted(which)))
        position = _read(step, layer)
        why = f"the bits of KV heads {names} in layer {layer} differ at position {position}"
        yield Hint(layer=layer, position=position, weight=SURE, why=why, heads=frozenset(which))
