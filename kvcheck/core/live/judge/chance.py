"""How often a wrong token of no cause in the cache would name an owner or a place.

A token of no cause is any node in a walk and any mark of the right phase, as a wrong sampler or a flipped bit gives.

Invariants:
- An owner or a place is named only if chance names as much in fewer than BOUND of such rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod

from kvcheck.core.live.judge.faults import Named, shown_by
from kvcheck.core.live.judge.steps import FEW, Step
from kvcheck.core.live.judge.verdicts import ServerSetting
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet

BOUND = 1e-3
UNNAMED = Named(why="a wrong token without a known cause in the KV cache would point to one as well")
Holders = Sequence[Mapping[int, tuple[int, ...]]]
"""Node -> numbers of requests that list it, in the round and before it: FEW + 2 at most."""


def owners(holders: Holders, node: int, *, but: int) -> tuple[int, ...]:
    each = (tuple(number for number in held.get(node, ()) if number != but) for held in holders)
    return next((whose for whose in each if 0 < len(whose) <= FEW), ())


def owned_share(alphabet: Alphabet, holders: Holders, own: Set[int], *, but: int) -> float:
    """Share of the nodes beside a request's own ones that name an owner."""
    foreign = {node for held in holders for node in held} - own
    return sum(bool(owners(holders, node, but=but)) for node in foreign) / (alphabet.parameters.nodes - len(own))


def at_least(hits: int, chances: Iterable[float]) -> float:
    """The probability of that many hits or more in trials of these chances."""
    by_count = [1.0]
    for chance in chances:
        pairs = zip((*by_count, 0), (0, *by_count), strict=True)
        by_count = [stay * (1 - chance) + come * chance for stay, come in pairs]
    return sum(by_count[hits:])


def is_failed_lookup(alphabet: Alphabet, token: int) -> bool:
    return token in (TOO_LITTLE, TOO_MUCH) or alphabet.lost_at(token) is not None


def unless_by_chance(
    setting: ServerSetting, taken: Sequence[Step], place: Named, *, failed: bool, owned: bool, answers: int
) -> Named:
    """Return the place, or why none is named. failed, owned: failed lookups, and owners, of the round are more than
    chance gives. answers: wrong ones of the round."""
    alphabet, wrong = setting.alphabet, [step for step in taken if not step.is_right]
    if any(is_failed_lookup(alphabet, step.answered) for step in wrong):
        return place if failed else UNNAMED
    if wrong[0].path:
        return place if owned else UNNAMED
    # Values that differ in the bits of one layer alone, and steps that read the page of the first wrong one.
    bits = [Counter(layer for layer, _ in shown_by(alphabet, step.expected)).values() for step in wrong]
    one_layer = prod(sum(2**count - 1 for count in each) / (2**alphabet.parameters.bits - 1) for each in bits)
    one_page = min(1.0, setting.page_tokens / len(taken)) ** (len(wrong) - 1)
    chance = (1.0 if place.layer is None else one_layer) * (1.0 if place.page is None else one_page)
    return place if place.why is not None or answers * chance < BOUND else UNNAMED
