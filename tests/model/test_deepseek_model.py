"""The written DeepSeek V3 weights (MLA) give the known answers, and none once a latent or a rotary part is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rigs.deepseek_forward import DeepseekForward
from rigs.known_answers import first_wrong, forward, least_margin, marks, questions, small, walk
from rigs.llama_forward import Cache, LlamaForward, as_fp8

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, reads
from kvcheck.core.model.deepseek_v3 import tensors

# Nats between the right token and the next one. It is 16, less what float32 sees of the norm's other registers.
LEAST_MARGIN = 15.9
FAMILY = {"family": "deepseek-v3"}
PAGE = slice(16, 32)
COUNT = 37


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("dtype", "fp8", "fp8_queries"),
    [
        (torch.float64, False, False),
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, False),
        (torch.bfloat16, True, True),
    ],
)
def test_every_token_is_the_known_one_in_every_dtype(dtype: torch.dtype, fp8: bool, fp8_queries: bool) -> None:
    parameters = small(**FAMILY)
    model = forward(parameters, dtype, as_fp8 if fp8 else None)
    model.rounds_queries = fp8_queries
    for request in questions(parameters):
        assert least_margin(parameters, model, request, COUNT) > LEAST_MARGIN


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 1},
        {"kv_heads": 16, "digits": 16, "base": 2, "layers": 3},
        {"kv_heads": 8, "digits": 8, "layers": 6},
        {"kv_heads": 2, "layers": 24},
        {"length": 4096, "nodes": 4096, "digits": 7, "distance": 256},
        {"kv_heads": 32, "digits": 32, "base": 2, "layers": 2},
    ],
    ids=str,
)
def test_every_token_is_the_known_one_in_every_shape(changes: dict[str, Any]) -> None:
    parameters = small(**FAMILY, **changes)
    model = forward(parameters, torch.bfloat16)
    for request in questions(parameters):
        assert least_margin(parameters, model, request, 12) > LEAST_MARGIN


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


def said(model: LlamaForward, request: tuple[int, ...], layer: int, change: Any) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer after `change(rotary parts, latents, those of another request)`."""
    with torch.inference_mode():
        cache, foreign = Cache(), Cache()
        logits = model.step(request, cache)
        model.step(walk(small(**FAMILY), count=COUNT, seed=2), foreign)
        change(cache.keys[layer], cache.values[layer], foreign.keys[layer], foreign.values[layer])
        return first_wrong(model, cache, logits, answers(Alphabet(small(**FAMILY)), request, COUNT))


def zero(k: torch.Tensor, c: torch.Tensor, _k: torch.Tensor, _c: torch.Tensor) -> None:
    k[PAGE] = c[PAGE] = 0


def foreign(k: torch.Tensor, c: torch.Tensor, other_k: torch.Tensor, other_c: torch.Tensor) -> None:
    k[PAGE], c[PAGE] = other_k[PAGE], other_c[PAGE]


def foreign_latents(_k: torch.Tensor, c: torch.Tensor, _other_k: torch.Tensor, other_c: torch.Tensor) -> None:
    c[PAGE] = other_c[PAGE]


def one_token(k: torch.Tensor, c: torch.Tensor, other_k: torch.Tensor, other_c: torch.Tensor) -> None:
    k[20], c[20] = other_k[20], other_c[20]


def twice_the_latents(_k: torch.Tensor, c: torch.Tensor, _other_k: torch.Tensor, _other_c: torch.Tensor) -> None:
    c[PAGE] *= 2


def half_the_latents(_k: torch.Tensor, c: torch.Tensor, _other_k: torch.Tensor, _other_c: torch.Tensor) -> None:
    c[PAGE] *= 0.5


DAMAGE = (zero, foreign, foreign_latents, one_token, twice_the_latents, half_the_latents)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", DAMAGE, ids=lambda change: change.__name__)
def test_the_walk_finds_damage_of_any_layer(model: LlamaForward, change: Any, layer: int) -> None:
    parameters = small(**FAMILY)
    request = walk(parameters, count=COUNT, seed=1)
    found = said(model, request, layer, change)
    assert found is not None
    if change is not twice_the_latents:  # they win lookups of every place, not only of their own
        touched = [set(read.positions) & set(range(16, 32)) for read in reads(Alphabet(parameters), request, COUNT)]
        assert touched[found[0]]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", [zero, half_the_latents], ids=lambda change: change.__name__)
def test_a_place_that_is_not_found_is_said_with_its_layer(model: LlamaForward, change: Any, layer: int) -> None:
    found = said(model, walk(small(**FAMILY), count=COUNT, seed=1), layer, change)
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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "fp16"}, "fp16 cannot hold"),
        ({"kv_heads": 64, "digits": 64, "base": 2}, "dimensions of a head; 125 hold"),
        ({"kv_heads": 57, "digits": 57, "base": 2}, "at most 56 digits; 57 for 57 KV heads"),
    ],
)
def test_sizes_without_room_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        next(iter(tensors(small(**FAMILY, **changes))))
