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


NODE = ALPHABET.node(7)
LAYERS = range(MODEL.layers)


@pytest.mark.parametrize(
    ("said", "right", "by_page", "by_state"),
    [
        (ALPHABET.mark(3, 0b01111011), RIGHT, [], []),  # of another phase
        (NODE, RIGHT, [], []),
        (ALPHABET.lost(2, None), NODE, [1, 2], [2]),  # a page is named by the next layer too
        (ALPHABET.ahead(2, None), NODE, [1, 2], [2]),
        (TOO_LITTLE, NODE, [3], []),
        (TOO_MUCH, NODE, [3], []),
    ],
)
def test_a_wrong_answer_names_these_layers(said: int, right: int, by_page: list[int], by_state: list[int]) -> None:
    assert [layer for layer in LAYERS if page_is_named(MODEL, said, right, layer, None)] == by_page
    assert [layer for layer in LAYERS if state_is_named(MODEL, said, right, layer, None)] == by_state


@pytest.mark.parametrize("token", [ALPHABET.lost, ALPHABET.ahead])
def test_a_head_is_named_where_the_answer_names_it(token: Callable[[int, int | None], int]) -> None:
    assert state_is_named(MODEL, token(1, None), NODE, 1, 2) and state_is_named(MODEL, token(1, 2), NODE, 1, 2)
    assert not state_is_named(MODEL, token(1, 3), NODE, 1, 2)
