"""The written Qwen3-Next weights give the known answers, and none once a state or a page of attention is damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.known_answers import (
    DAMAGE,
    LEAST_MARGIN,
    PAGE,
    first_wrong,
    first_wrong_at_once,
    forward,
    least_margin,
    lost,
    marks,
    small,
    walk,
)
from rigs.llama_forward import Cache, LlamaForward
from rigs.qwen3_next_forward import Qwen3NextForward

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers

FAMILY = {"family": "qwen3-next"}
ATTENTION = 3
STATES = range(3)
COUNT = 37
FIRST = 2  # answers before a state is damaged


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_first_marks_of_a_request_are_read_rightly(kv_heads: int) -> None:
    """Their states have no marks to read yet. What many heads then say must not reach their keys."""
    parameters = small(**FAMILY, kv_heads=kv_heads, nodes=1024, digits=6)
    model = forward(parameters, torch.bfloat16)
    for seed in range(4):
        request = marks(parameters, count=parameters.farthest + 1, seed=seed)
        assert least_margin(parameters, model, request, 8) > LEAST_MARGIN


@pytest.fixture(scope="module")
def model() -> LlamaForward:
    return forward(small(**FAMILY))


@pytest.mark.parametrize("question", [walk, marks], ids=["walk", "marks"])
@pytest.mark.parametrize("cut", [1, 3, 64, 65, 69])
def test_a_prompt_in_parts_gives_the_same_answers(model: LlamaForward, question: Any, cut: int) -> None:
    """Cut anywhere, also where a chunk of the state ends; and answers read again as a prompt, as after a retraction.

    Later answers come one by one: the recurrence goes on where chunks ended.
    """
    parameters, cache = small(**FAMILY), Cache()
    request = question(parameters, count=70)
    expected = answers(Alphabet(parameters), request, 9 + 8)
    model.step(request[:cut], cache)
    logits = model.step([*request[cut:], *expected[:9]], cache)
    assert first_wrong(model, cache, logits, expected[9:]) is None


class Asked:
    """A request on a model, and its states after each of the first answers."""

    def __init__(self, model: LlamaForward, request: tuple[int, ...]) -> None:
        self.model = model
        self.expected = answers(Alphabet(small(**FAMILY)), request, COUNT)
        cache = Cache()
        self.logits = model.step(request, cache)
        self.after = [cache.copy()]
        for token in self.expected[:FIRST]:
            self.logits = model.step([token], cache)
            self.after.append(cache.copy())

    def said(self, change: Callable[[Cache, Asked], None], most: int = COUNT) -> tuple[int, int] | None:
        """(step after the damage, token) of the first wrong answer, of `most` answers."""
        cache = self.after[-1].copy()
        change(cache, self)
        found = first_wrong_at_once(self.model, cache, self.logits, self.expected[FIRST : FIRST + most])
        assert found is None or found[0] > 0, "an answer was wrong before the damage"
        return found

    def twice(self, layer: int) -> torch.Tensor:
        """That layer's state with its last update done again."""
        cache = self.after[-1].copy()
        cache.keys[layer] = self.after[-2].keys[layer].clone()
        self.model.step(self.expected[FIRST - 1 : FIRST], cache)
        return cache.values[layer]


@pytest.fixture(scope="module")
def asked(model: LlamaForward) -> dict[str, Asked]:
    parameters = small(**FAMILY)
    requests = {"walk": walk(parameters, count=COUNT), "other walk": walk(parameters, count=COUNT, seed=2)}
    requests["marks"] = marks(parameters, count=parameters.farthest + 2)
    requests["other marks"] = marks(parameters, count=parameters.farthest + 3, seed=2)
    return {name: Asked(model, request) for name, request in requests.items()}


StateOf = Callable[[int, Asked, Asked], torch.Tensor]
STATE_DAMAGE: dict[str, tuple[str, StateOf, bool]] = {
    "zero": ("values", lambda layer, own, _: torch.zeros_like(own.after[-1].values[layer]), True),
    "foreign": ("values", lambda layer, _, other: other.after[-1].values[layer], True),
    "half": ("values", lambda layer, own, _: own.after[-1].values[layer] / 2, True),
    "twice as strong": ("values", lambda layer, own, _: own.after[-1].values[layer] * 2, True),
    "one step old": ("values", lambda layer, own, _: own.after[-2].values[layer], False),
    "updated twice": ("values", lambda layer, own, _: own.twice(layer), False),
    "window zero": ("keys", lambda layer, own, _: torch.zeros_like(own.after[-1].keys[layer]), False),
    "window one step old": ("keys", lambda layer, own, _: own.after[-2].keys[layer], False),
    "window foreign": ("keys", lambda layer, _, other: other.after[-1].keys[layer], False),
}
"""Damage -> where, what is there then, and whether a walk sees it: its answers write nothing that a later one reads."""


def after_damage(name: str, layer: int, own: Asked, other: Asked, most: int = COUNT) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer of a request of which one layer's state or window is damaged."""
    where, value, _ = STATE_DAMAGE[name]
    return own.said(lambda cache, _: getattr(cache, where).__setitem__(layer, value(layer, own, other).clone()), most)


@pytest.mark.parametrize("layer", STATES)
@pytest.mark.parametrize("name", STATE_DAMAGE)
def test_damage_of_a_state_is_found_by_the_marks_with_its_layer(asked: dict[str, Asked], name: str, layer: int) -> None:
    named = lost(small(**FAMILY), after_damage(name, layer, asked["marks"], asked["other marks"], 4))
    assert named is not None and named[0] == layer


@pytest.mark.parametrize("layer", STATES)
@pytest.mark.parametrize("name", STATE_DAMAGE)
def test_a_walk_finds_a_wrong_state_and_not_a_missing_step(asked: dict[str, Asked], name: str, layer: int) -> None:
    found = after_damage(name, layer, asked["walk"], asked["other walk"])
    assert (found is not None) == STATE_DAMAGE[name][2]


@pytest.mark.parametrize("layer", STATES)
@pytest.mark.parametrize("head", range(8))
def test_one_value_head_of_a_state_is_named_with_its_kv_head(asked: dict[str, Asked], layer: int, head: int) -> None:
    """Two value heads of one key head, and a key head a KV head."""

    def change(cache: Cache, _asked: Asked) -> None:
        cache.values[layer] = cache.values[layer].index_fill(0, torch.tensor([head]), 0.0)

    assert lost(small(**FAMILY), asked["marks"].said(change, 4)) == (layer, head // 2)


@pytest.mark.parametrize("layer", STATES)
@pytest.mark.parametrize("earlier", ["walk", "marks"])
def test_a_state_that_was_not_cleared_is_lost_at_the_next_attention(
    model: LlamaForward, asked: dict[str, Asked], layer: int, earlier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = small(**FAMILY)
    assert isinstance(model, Qwen3NextForward)
    monkeypatch.setitem(model.left_over, layer, asked[earlier].after[-1].values[layer])
    said = int(model.step(walk(parameters, count=COUNT, seed=3), Cache()).argmax())
    assert Alphabet(parameters).lost_at(said) == (ATTENTION, None)


def test_a_chunk_that_was_not_applied_is_found_by_the_walk(model: LlamaForward) -> None:
    """The state of layer 1 lacks what the second part of the prompt wrote."""
    parameters = small(**FAMILY)
    request = walk(parameters, count=121)
    expected = answers(Alphabet(parameters), request, 60)
    cache = Cache()
    model.step(request[:64], cache)
    first = cache.values[1].clone()
    logits = model.step(request[64:], cache)
    cache.values[1] = first
    assert lost(parameters, first_wrong_at_once(model, cache, logits, expected)) == (1, None)


@pytest.mark.parametrize("change", ["zero", "foreign", "half the keys", "keys of one head"])
def test_the_walk_finds_a_page_of_attention(asked: dict[str, Asked], change: str) -> None:
    def damaged(cache: Cache, _asked: Asked) -> None:
        other = asked["other walk"].after[-1]
        DAMAGE[change](cache.keys[ATTENTION], cache.values[ATTENTION], other.keys[ATTENTION], other.values[ATTENTION])

    named = lost(small(**FAMILY), asked["walk"].said(damaged))
    assert named is not None and named[0] == ATTENTION


def test_keys_at_another_position_are_found_by_the_marks_alone(model: LlamaForward, asked: dict[str, Asked]) -> None:
    def moved(cache: Cache, _asked: Asked) -> None:
        cache.keys[ATTENTION][PAGE] = model.turn(cache.keys[ATTENTION][PAGE], torch.ones(16))

    assert asked["walk"].said(moved) is None
    assert lost(small(**FAMILY), asked["marks"].said(moved)) == (ATTENTION, None)
