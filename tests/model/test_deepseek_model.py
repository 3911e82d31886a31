"""The written DeepSeek V3 weights (MLA) give the known answers, and none once a latent or a rotary part is damaged."""

from __future__ import annotations

import pytest
import torch
from rigs.deepseek_forward import DeepseekForward
from rigs.known_answers import (
    DAMAGE,
    LEAST_MARGIN,
    PAGE,
    Damage,
    first_wrong,
    forward,
    least_margin,
    marks,
    questions,
    small,
    walk,
)
from rigs.llama_forward import Cache, LlamaForward

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, reads

FAMILY = {"family": "deepseek-v3"}
COUNT = 37


def test_a_latent_holds_what_its_token_holds_and_nothing_else() -> None:
    """But for what a softmax leaves of other keys: e to the power of minus half a digit's 36 nats, at most."""
    parameters = small(**FAMILY)
    model = forward(parameters, torch.bfloat16)
    for request in questions(parameters):
        cache = Cache()
        model.step(request, cache)
        for latents in cache.values:
            assert set(latents[latents > 1e-7].unique().tolist()) == {1 / 64, 8.0} and float(latents.min()) == 0


@pytest.fixture(scope="module")
def model() -> LlamaForward:
    return forward(small(**FAMILY))


def said(model: LlamaForward, request: tuple[int, ...], layer: int, change: Damage) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer after a change of rotary parts and latents."""
    cache, foreign = Cache(), Cache()
    logits = model.step(request, cache)
    model.step(walk(small(**FAMILY), count=COUNT, seed=2), foreign)
    change(cache.keys[layer], cache.values[layer], foreign.keys[layer], foreign.values[layer])
    return first_wrong(model, cache, logits, answers(Alphabet(small(**FAMILY)), request, COUNT))


LATENT_DAMAGE = ("zero", "foreign", "foreign values", "one token", "twice the values", "half the values")


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", LATENT_DAMAGE)
def test_the_walk_finds_damage_of_any_layer(model: LlamaForward, change: str, layer: int) -> None:
    parameters = small(**FAMILY)
    request = walk(parameters, count=COUNT, seed=1)
    found = said(model, request, layer, DAMAGE[change])
    assert found is not None
    if change != "twice the values":  # they win lookups of every place, not only of their own
        touched = [set(read.positions) & set(range(16, 32)) for read in reads(Alphabet(parameters), request, COUNT)]
        assert touched[found[0]]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", ["zero", "half the values"])
def test_a_place_that_is_not_found_is_said_with_its_layer(model: LlamaForward, change: str, layer: int) -> None:
    found = said(model, walk(small(**FAMILY), count=COUNT, seed=1), layer, DAMAGE[change])
    assert found is not None and Alphabet(small(**FAMILY)).lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize("layer", range(4))
def test_a_rotary_part_at_another_position_is_found_by_the_marks_alone(model: LlamaForward, layer: int) -> None:
    def moved(k: torch.Tensor, c: torch.Tensor, other_k: torch.Tensor, other_c: torch.Tensor) -> None:
        k[PAGE] = model.turn(k[PAGE], torch.ones(16))

    parameters = small(**FAMILY)
    assert said(model, walk(parameters, count=COUNT, seed=1), layer, moved) is None
    found = said(model, marks(parameters, count=parameters.distance + 3), layer, moved)
    assert found is not None and Alphabet(parameters).lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 3), (2, 1), (3, 2)])
def test_a_wrong_bit_of_a_mark_names_layer_and_head(layer: int, head: int) -> None:
    """One head's values of the latent are wrong, as a wrong slice of kv_b over ranks makes them."""
    parameters = small(**FAMILY)
    wrong, request = forward(parameters), marks(parameters, count=parameters.distance + 3)
    assert isinstance(wrong, DeepseekForward)
    weight = wrong.w[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].unflatten(0, (parameters.kv_heads, -1))
    weight[head, -3:-1] = weight[head, -3:-1].flip(0)
    alphabet = Alphabet(parameters)
    cache = Cache()
    expected = answers(alphabet, request, COUNT)
    found = first_wrong(wrong, cache, wrong.step(request, cache), expected)
    assert found is not None
    (phase, right), (also, got) = alphabet.as_mark(expected[found[0]]), alphabet.as_mark(found[1])  # type: ignore[misc]
    assert phase == also
    pair = (phase - 1) % parameters.phases * parameters.bits + (right ^ got).bit_length() - 1
    assert divmod(pair, parameters.kv_heads) == (layer, head)


def test_the_largest_number_of_digits_is_exact_on_the_latents() -> None:
    parameters = small(**FAMILY, kv_heads=56, digits=56, base=2, layers=2)
    assert least_margin(parameters, forward(parameters, torch.bfloat16), walk(parameters, count=9), 3) > LEAST_MARGIN
