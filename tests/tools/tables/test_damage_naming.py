"""The column `named` of the damage tables counts an answer that says the damaged place, and no other one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rigs.known_answers import small

from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet
from tools.tables.damage_naming import page_is_named, state_is_named

MODEL = small(family="qwen3-next")
ALPHABET = Alphabet(MODEL)
RIGHT = ALPHABET.mark(1, 0b01111010)
"""What follows a mark of phase 0: its bits are those of the four heads of layer 0, then of layer 1."""


@pytest.mark.parametrize("named", [page_is_named, state_is_named])
@pytest.mark.parametrize(
    ("value", "layer", "head", "is_named"),
    [
        (0b01111101, 0, None, True),
        (0b01101010, 1, None, True),
        (0b01101010, 1, 0, True),
        (0b01101010, 1, 2, False),
        (0b01101010, 0, None, False),
        (0b01101011, 0, None, False),
        (0b01101011, 1, None, False),
    ],
)
def test_a_wrong_mark_names_the_places_of_its_wrong_bits(
    named: Callable[..., bool], value: int, layer: int, head: int | None, is_named: bool
) -> None:
    assert named(MODEL, ALPHABET.mark(1, value), RIGHT, layer, head) == is_named


@pytest.mark.parametrize("said", [ALPHABET.mark(3, 0b01111011), ALPHABET.node(7)])
def test_a_mark_of_another_phase_and_a_node_name_nothing(said: int) -> None:
    for layer in range(MODEL.layers):
        assert not page_is_named(MODEL, said, RIGHT, layer, None)
        assert not state_is_named(MODEL, said, RIGHT, layer, None)


@pytest.mark.parametrize("token", [ALPHABET.lost, ALPHABET.ahead])
def test_a_state_is_named_by_its_own_layer_alone_and_a_page_by_the_next_one_too(
    token: Callable[[int, int | None], int],
) -> None:
    right = ALPHABET.node(7)
    assert state_is_named(MODEL, token(1, None), right, 1, 2) and state_is_named(MODEL, token(1, 2), right, 1, 2)
    assert not state_is_named(MODEL, token(2, None), right, 1, None)
    assert not state_is_named(MODEL, token(1, 3), right, 1, 2)
    assert page_is_named(MODEL, token(2, None), right, 1, None) and not page_is_named(MODEL, token(3, 0), right, 1, 0)


@pytest.mark.parametrize("said", [TOO_LITTLE, TOO_MUCH])
def test_too_little_and_too_much_name_pages_of_the_last_layer_and_no_state(said: int) -> None:
    right = ALPHABET.node(7)
    assert [page_is_named(MODEL, said, right, layer, None) for layer in range(4)] == [False, False, False, True]
    assert not any(state_is_named(MODEL, said, right, layer, None) for layer in range(4))
