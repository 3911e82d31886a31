"""How often a wrong token of no cause in the cache would name an owner or a place.

A token of no cause is any node in a walk, and any mark of the right phase in a position test: a wrong sampler or a
flipped bit gives one. A lookup that found nothing, or too much, answers a word that no question has.

Invariants:
- An owner or a place is named only if chance names as much in fewer than BOUND of such rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.live.judge.faults import Named, shown_by
from kvcheck.core.live.judge.steps import FEW, Step
from kvcheck.core.live.judge.verdicts import ServerSetting
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet

BOUND = 1e-3
UNNAMED = "a wrong token without a known cause in the KV cache would point to one as well"


@dataclass(frozen=True, slots=True)
class Holders:
    """Node -> numbers of requests that list it, in the round and before it: FEW + 2 at most."""

    of_round: Mapping[int, tuple[int, ...]]
    before: Mapping[int, tuple[int, ...]]

    def owners(self, node: int, *, but: int) -> tuple[int, ...]:
        for held in (self.of_round, self.before):
            whose = tuple(number for number in held.get(node, ()) if number != but)
            if 0 < len(whose) <= FEW:
                return whose
        return ()

    def share(self, alphabet: Alphabet, own: Collection[int | None], *, but: int) -> float:
        """Share of the nodes beside a request's own ones that name an owner."""
        foreign = (self.of_round.keys() | self.before.keys()) - own
        named = sum(bool(self.owners(node, but=but)) for node in foreign)
        return named / max(1, alphabet.parameters.nodes - len({*own} - {None}))


def at_least(hits: int, chances: Iterable[float]) -> float:
    """The probability of that many hits or more in trials of these chances."""
    by_count = [1.0]
    for chance in chances:
        by_count = [
            stay * (1 - chance) + come * chance for stay, come in zip((*by_count, 0), (0, *by_count), strict=True)
        ]
    return sum(by_count[hits:])


def says_a_lookup_failed(alphabet: Alphabet, token: int) -> bool:
    return token in (TOO_LITTLE, TOO_MUCH) or alphabet.lost_at(token) is not None


def unless_by_chance(
    setting: ServerSetting, taken: Sequence[Step], place: Named, *, failed: bool, owned: bool, answers: int
) -> Named:
    """Return the place, or why none is named. failed: failed lookups of the round are more than chance gives; owned:
    owners are. answers: wrong ones of the round."""
    wrong = [step for step in taken if not step.is_right]
    if any(says_a_lookup_failed(setting.alphabet, step.answered) for step in wrong):
        return place if failed else Named(why=UNNAMED)
    if wrong[0].path:
        return place if owned else Named(why=UNNAMED)
    if place.layer is None and place.page is None:
        return place
    chance = float(answers)
    if place.layer is not None:
        for step in wrong:
            chance *= one_layer(setting.alphabet, step)
    if place.page is not None:
        chance *= min(1.0, setting.page_tokens / len(taken)) ** (len(wrong) - 1)
    return place if chance < BOUND else Named(why=UNNAMED)


def one_layer(alphabet: Alphabet, step: Step) -> float:
    """Share of the wrong values of a mark that differ in the bits of one layer alone."""
    bits = Counter(layer for layer, _ in shown_by(alphabet, step.expected))
    return sum((1 << count) - 1 for count in bits.values()) / ((1 << alphabet.parameters.bits) - 1)
