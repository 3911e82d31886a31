"""Which layers and heads a wrong answer of a known-answer model names: the column `named` of the damage tables.

Invariants:
- A wrong mark names the layer and head of each bit that differs, and nothing where its phase is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.model.parameters import Parameters, shown_pair


def bits_name(parameters: Parameters, said: int, expected: int, layer: int, head: int | None) -> bool:
    """Whether a wrong mark differs in bits of that layer alone, and of that head where one is given."""
    alphabet = Alphabet(parameters)
    mark, right = alphabet.as_mark(said), alphabet.as_mark(expected)
    if mark is None or right is None or mark[0] != right[0]:
        return False
    wrong = mark[1] ^ right[1]
    phase = (mark[0] - 1) % parameters.phases
    pairs = [shown_pair(parameters, phase, bit) for bit in range(parameters.bits) if wrong >> bit & 1]
    places = [(parameters.showing[pair // parameters.kv_heads], pair % parameters.kv_heads) for pair in pairs]
    return all(at == layer and head in (None, which) for at, which in places)


def page_is_named(parameters: Parameters, said: int, expected: int, layer: int, head: int | None) -> bool:
    """Whether a wrong answer names the layer of a damaged page, and its head where it names one.

    Wrong values of a walk are named by the next layer too, which looks for what they say.
    """
    if said in (TOO_LITTLE, TOO_MUCH):
        return layer == parameters.hopping[-1]
    if (lost := Alphabet(parameters).lost_at(said)) is not None:
        after = next((each for each in parameters.hopping if each > layer), None)
        return lost[0] == after or (lost[0] == layer and (head is None or lost[1] in (None, head)))
    return bits_name(parameters, said, expected, layer, head)


def state_is_named(parameters: Parameters, said: int, expected: int, layer: int, head: int | None) -> bool:
    """Whether a wrong answer names the layer of a damaged state, and its KV head where it names one."""
    if (lost := Alphabet(parameters).lost_at(said)) is not None:
        return lost[0] == layer and (head is None or lost[1] in (None, head))
    return bits_name(parameters, said, expected, layer, head)


def found_row(heads: str, layer: int, trials: int, found: Sequence[tuple[int, bool]]) -> dict[str, object]:
    """A row of a damage table. found: of each trial with a wrong answer, its step, and whether it named the place."""
    return {
        "heads": heads,
        "layer": layer,
        "trials": trials,
        "found": len(found),
        "median_step": median(step for step, _ in found) if found else "",
        "named": sum(is_named for _, is_named in found),
    }
