"""Answers are worked out from tokens alone; requests without one answer are refused."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.known_answers import marks, small, walk

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.model.alphabet import BEGIN, GUARD, HEADER, Alphabet
from kvcheck.core.model.answers import answers, draw_nodes, mark_prompt, reads, walk_prompt
from kvcheck.core.model.parameters import node_digits

MODEL = small()
ALPHABET = Alphabet(MODEL)


def test_a_walk_makes_a_hop_a_layer_but_the_first() -> None:
    request = walk_prompt(ALPHABET, [7, 3, 9, 200, 41], 1)
    assert request == (*HEADER, *(ALPHABET.place(node) for node in (7, 3, 9, 200, 41, 7)), ALPHABET.node(3))
    # Three hops from 3: 9, 200, 41. Then 7, 3, 9. Then 200, 41, 7.
    assert answers(ALPHABET, request, 3) == tuple(ALPHABET.node(node) for node in (41, 9, 7))


@given(count=st.integers(2, 60), seed=st.integers(0, 1 << 32))
def test_a_round_of_a_walk_reads_every_place_in_every_layer(count: int, seed: int) -> None:
    if gcd(count, MODEL.hops) != 1:
        count += 1
    request = walk(MODEL, count=count, seed=seed)
    each = [{read.positions[layer] for read in reads(ALPHABET, request, count)} for layer in range(MODEL.layers)]
    places = set(range(len(HEADER), len(request) - 1))
    assert each[0] == places - {len(request) - 2}  # layer 0 finds the first of the two places of the first node
    assert all(read == places - {len(HEADER)} for read in each[1:])  # a hop finds the second one


def test_a_mark_answers_with_the_value_so_far_back_and_the_next_phase() -> None:
    values = [Rng(5).below(1 << MODEL.bits) + i & 255 for i in range(MODEL.distance + 3)]
    request = mark_prompt(ALPHABET, values, 0)
    phase = (len(values)) % MODEL.phases
    said = answers(ALPHABET, request, 2)
    assert said == (ALPHABET.mark(phase, values[2]), ALPHABET.mark(phase + 1, values[3]))
    assert reads(ALPHABET, request, 2)[1].positions == (len(HEADER) + 3,) * MODEL.layers


def test_layers_with_a_window_are_read_by_marks_alone_at_its_first_position() -> None:
    model = small(family="gpt-oss")
    alphabet = Alphabet(model)
    request = walk_prompt(alphabet, [7, 3, 9, 200, 41], 1)
    # Two hops from 3: 9 and 200. Then 41 and 7. Then 3 and 9.
    assert answers(alphabet, request, 3) == tuple(alphabet.node(node) for node in (200, 7, 9))
    first, second, _ = reads(alphabet, request, 3)
    assert (first.positions, second.positions) == ((None, 4, None, 5), (None, 6, None, 7))
    tested = marks(model, count=model.farthest + 3)
    last = len(tested) - 1
    (read,) = reads(alphabet, tested, 1)
    assert read.positions == (last - 23, last - 31, last - 23, last - 31)  # a window of 24, a distance of 31


def test_a_mark_has_each_bit_from_where_its_layer_reads() -> None:
    model = small(family="gpt-oss")
    alphabet = Alphabet(model)
    values = [Rng(5).below(256) + 37 * i & 255 for i in range(model.farthest + 3)]
    (said,) = answers(alphabet, mark_prompt(alphabet, values, 0), 1)
    phase, value = alphabet.as_mark(said)  # type: ignore[misc]
    assert phase == len(values) % model.phases
    # Eight bits are two layers of four heads: the first one reads 23 back, the second one 31.
    assert value == values[-1 - 23] & 0x0F | values[-1 - 31] & 0xF0


def test_a_second_turn_asks_for_its_own_walk_and_for_the_first() -> None:
    first = walk_prompt(ALPHABET, [1, 2, 3, 4, 5], 0)
    turn = (*first, *answers(ALPHABET, first, 4), *(ALPHABET.place(node) for node in (10, 11, 12, 13, 14, 10)))
    assert answers(ALPHABET, (*turn, ALPHABET.node(11)), 1) == (ALPHABET.node(14),)
    assert answers(ALPHABET, (*turn, ALPHABET.node(2)), 1) == (ALPHABET.node(5),)


def test_two_nodes_differ_in_two_digits_and_each_digit_takes_every_value() -> None:
    for changes in ({}, {"base": 2, "digits": 9, "kv_heads": 2}, {"digits": 8, "kv_heads": 8}):
        model = small(**changes)
        written = [node_digits(model, node) for node in range(model.nodes)]
        for i in range(model.digits):  # left out, the others still tell all nodes apart
            assert len({digits[:i] + digits[i + 1 :] for digits in written}) == model.nodes
        assert all({digits[i] for digits in written} == set(range(model.base)) for i in range(model.digits))


@pytest.mark.parametrize(
    ("request_ids", "said"),
    [
        ((), "begins with"),
        ((BEGIN, 17), "begins with"),
        ((BEGIN, GUARD), "begins with"),
        ((BEGIN, GUARD, ALPHABET.place(1)), "last token of a request"),
        ((BEGIN, GUARD, ALPHABET.place(1), ALPHABET.node(2)), "asks for node 2"),
        ((BEGIN, GUARD, ALPHABET.place(1), ALPHABET.place(2), ALPHABET.node(1)), "walk ends at node 2"),
        (
            (BEGIN, GUARD, *(ALPHABET.place(n) for n in (1, 2, 1, 3)), ALPHABET.node(1)),
            "node 1 is followed by two nodes",
        ),
        ((BEGIN, GUARD, ALPHABET.mark(0, 3)), "is not a mark"),
    ],
)
def test_a_request_without_one_answer_is_refused(request_ids: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        answers(ALPHABET, request_ids, 1)


def test_a_walk_that_would_leave_places_unread_is_refused() -> None:
    with pytest.raises(UsageError, match="share a factor"):
        walk_prompt(ALPHABET, list(range(6)), 0)
    with pytest.raises(UsageError, match="each once"):
        walk_prompt(ALPHABET, [1, 2, 1, 4], 0)
    with pytest.raises(UsageError, match="more than 31 marks"):
        mark_prompt(ALPHABET, [1] * 31, 0)
    with pytest.raises(UsageError, match="at most 512 tokens"):
        answers(ALPHABET, walk(MODEL, count=61), 500)
    with pytest.raises(UsageError, match="more --nodes"):
        draw_nodes(ALPHABET, Rng(1), 257)


def test_every_id_has_one_meaning() -> None:
    kinds = [
        [
            known(token) is not None
            for known in (ALPHABET.lost_at, ALPHABET.as_place, ALPHABET.as_node, ALPHABET.as_mark)
        ]
        for token in range(ALPHABET.size)
    ]
    assert [sum(column) for column in zip(*kinds, strict=True)] == [20, 256, 256, 2 * 256]
    assert all(sum(row) <= 1 for row in kinds)
    words = ALPHABET.words()
    assert len(set(words)) == ALPHABET.size
    assert not any(" " in word for word in words)
    assert ALPHABET.lost_at(ALPHABET.lost(2, 3)) == (2, 3)
    assert ALPHABET.lost_at(ALPHABET.lost(2, None)) == (2, None)
