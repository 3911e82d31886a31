"""The written DeepSeek V3 weights (MLA) give the known answers, and none once a latent or a rotary part is damaged."""

from __future__ import annotations

import pytest
import torch
from rigs.deepseek_forward import DeepseekForward
from rigs.known_answers import (
    LEAST_MARGIN,
    first_wrong,
    forward,
    least_margin,
    marks,
    place_of_bit,
    questions,
    small,
    walk,
)
from rigs.llama_forward import Cache

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers

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


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 3), (2, 1), (3, 2)])
def test_a_wrong_bit_of_a_mark_names_layer_and_head(layer: int, head: int) -> None:
    """One head's values of the latent are wrong, as a wrong slice of kv_b over ranks makes them."""
    parameters = small(**FAMILY)
    wrong, request = forward(parameters), marks(parameters, count=parameters.distance + 3)
    assert isinstance(wrong, DeepseekForward)
    weight = wrong.w[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].unflatten(0, (parameters.kv_heads, -1))
    weight[head, -3:-1] = weight[head, -3:-1].flip(0)
    cache, expected = Cache(), answers(Alphabet(parameters), request, COUNT)
    found = first_wrong(wrong, cache, wrong.step(request, cache), expected)
    assert found is not None and place_of_bit(parameters, expected[found[0]], found[1]) == (layer, head)


def test_the_largest_number_of_digits_is_exact_on_the_latents() -> None:
    parameters = small(**FAMILY, kv_heads=56, digits=56, base=2, layers=2)
    assert least_margin(parameters, forward(parameters, torch.bfloat16), walk(parameters, count=9), 3) > LEAST_MARGIN
