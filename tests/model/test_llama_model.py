"""The written Llama weights give the known answers, in every dtype and shape, and none once the cache is damaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from rigs.llama_forward import Cache, LlamaForward, as_fp8

from kvcheck.core.model.alphabet import BEGIN, Alphabet
from kvcheck.core.model.answers import answers, reads
from kvcheck.core.model.parameters import KV_SCALES


@pytest.mark.parametrize("kv_scale", KV_SCALES)
@pytest.mark.parametrize("fp8_queries", [False, True])
def test_every_token_is_the_known_one_with_scales_of_a_cache_in_fp8(kv_scale: int, fp8_queries: bool) -> None:
    parameters = small(dtype="fp8-kv", kv_scale=kv_scale)
    model = forward(parameters, torch.bfloat16, as_fp8)
    model.rounds_queries = fp8_queries
    assert [model.scales(layer) for layer in range(4)] == [parameters.scales(layer) for layer in range(4)]
    for request in questions(parameters):
        assert least_margin(parameters, model, request, 37) > LEAST_MARGIN


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("what", ["k_scale", "v_scale"])
@pytest.mark.parametrize("by", [0.5, 2])
def test_a_scale_that_is_lost_on_one_side_is_found(what: str, layer: int, by: float) -> None:
    """What was stored with the checkpoint's scale is read with another one."""
    parameters = small(dtype="fp8-kv", kv_scale=2)
    model = forward(parameters, torch.bfloat16, as_fp8)
    found = []
    for request in questions(parameters):
        cache, name = Cache(), f"model.layers.{layer}.self_attn.{what}"
        logits = model.step(request, cache)
        right = model.w[name]
        model.w[name] = right * by
        # New tokens are stored with it too, so that only what the prompt left is read wrongly.
        found.append(first_wrong(model, cache, logits, answers(Alphabet(parameters), request, 37)))
        model.w[name] = right
    assert any(found)


@pytest.mark.parametrize(
    ("rounded", "queries_too", "least"),
    [(None, False, 13), (as_fp8, False, 9.5), (as_fp8, True, 6.5)],
    ids=["bf16", "keys in fp8", "queries in fp8"],
)
@pytest.mark.parametrize(("head_dim", "length"), [(64, 32768), (64, 1 << 17), (128, 32768), (256, 32768)])
def test_the_key_at_the_distance_leads_begin_at_every_position(
    rounded: Any, queries_too: bool, least: float, head_dim: int, length: int
) -> None:
    """Of 14 nats, what rounding of turned queries and keys leaves: `<begin>` weighs exp(-6.5) at the most."""
    parameters = small(layers=2, kv_heads=2, head_dim=head_dim, length=length, distance=256)
    model, positions = forward(parameters, torch.bfloat16, rounded), torch.arange(length)
    q, k, _ = (each[:, 0] for each in model.projected(0, model.embedded([Alphabet(parameters).mark(0, 0), BEGIN])))
    queries = model.turn(q[:1, None].expand(length, 1, -1), positions)[:, 0]
    queries = (as_fp8(queries) if queries_too else queries).float()
    keys = model.rounded(model.turn(k[:1, None].expand(length, 1, -1), positions))[:, 0].float()
    asked, begin = (queries[256:] * keys[:-256]).sum(1), queries[256:] @ k[1].float()
    assert float((asked - begin).min()) / head_dim**0.5 > least


@pytest.fixture(scope="module")
def small_model() -> LlamaForward:
    return forward(small())


def damaged(model: LlamaForward, request: tuple[int, ...], other: tuple[int, ...], layer: int, change: Damage) -> Any:
    """(step, token) of the first wrong answer after the change."""
    cache, foreign = Cache(), Cache()
    logits = model.step(request, cache)
    model.step(other, foreign)
    change(cache.keys[layer], cache.values[layer], foreign.keys[layer], foreign.values[layer])
    return first_wrong(model, cache, logits, answers(Alphabet(small()), request, 37))


PAGE_DAMAGE = [name for name in DAMAGE if name not in ("foreign values", "half the values")]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", PAGE_DAMAGE)
def test_the_walk_finds_damage_of_any_layer(small_model: LlamaForward, change: str, layer: int) -> None:
    request, other = walk(small(), count=37, seed=1), walk(small(), count=37, seed=2)
    step, _ = damaged(small_model, request, other, layer, DAMAGE[change])
    if change != "twice the keys":  # twice the keys win lookups of every place, not only of their own
        touched = [set(read.positions) & set(range(16, 32)) for read in reads(Alphabet(small()), request, 37)]
        assert touched[step]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", ["zero", "foreign", "keys of one head", "half the keys"])
def test_a_place_that_is_not_found_is_said_with_its_layer(small_model: LlamaForward, change: str, layer: int) -> None:
    request, other = walk(small(), count=37, seed=1), walk(small(), count=37, seed=2)
    _, said = damaged(small_model, request, other, layer, DAMAGE[change])
    head = 2 if change == "keys of one head" else None
    assert Alphabet(small()).lost_at(said) == (layer, head)


@pytest.mark.parametrize("layer", range(4))
def test_a_page_at_another_position_is_found_by_the_marks_alone(small_model: LlamaForward, layer: int) -> None:
    def moved(k: torch.Tensor, v: torch.Tensor, other_k: torch.Tensor, other_v: torch.Tensor) -> None:
        k[PAGE] = small_model.turn(k[PAGE], torch.ones(16))

    blind = walk(small(), count=37, seed=1)
    assert damaged(small_model, blind, blind, layer, moved) is None
    request = marks(small(), count=small().distance + 3)
    _, said = damaged(small_model, request, request, layer, moved)
    assert Alphabet(small()).lost_at(said) == (layer, None)


def test_a_query_at_another_position_is_found_by_the_marks(small_model: LlamaForward) -> None:
    request, cache = marks(small(), count=small().distance + 3), Cache()
    small_model.step(request[:-1], cache)
    said = int(small_model.step(request[-1:], cache, query_shift=1).argmax())
    assert said != answers(Alphabet(small()), request, 1)[0]


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 3), (2, 1), (3, 2)])
def test_a_wrong_bit_of_a_mark_names_layer_and_head(small_model: LlamaForward, layer: int, head: int) -> None:
    def flipped(k: torch.Tensor, v: torch.Tensor, other_k: torch.Tensor, other_v: torch.Tensor) -> None:
        v[PAGE, head, -3:-1] = v[PAGE, head, -3:-1].flip(-1)

    parameters, request = small(), marks(small(), count=small().distance + 3)
    alphabet = Alphabet(parameters)
    step, said = damaged(small_model, request, request, layer, flipped)
    expected = answers(alphabet, request, step + 1)[-1]
    (phase, right), (also, wrong) = alphabet.as_mark(expected), alphabet.as_mark(said)  # type: ignore[misc]
    assert phase == also
    pair = (phase - 1) % parameters.phases * parameters.bits + (right ^ wrong).bit_length() - 1
    assert divmod(pair, parameters.kv_heads) == (layer, head)


def test_two_pages_swapped_in_one_layer_change_nothing(small_model: LlamaForward) -> None:
    """Attention does not depend on the order of its keys: a table that lists pages in another order is right."""

    def swapped(k: torch.Tensor, v: torch.Tensor, other_k: torch.Tensor, other_v: torch.Tensor) -> None:
        for rows in (k, v):
            rows[2:18], rows[18:34] = rows[18:34].clone(), rows[2:18].clone()

    for request in questions(small()):
        assert damaged(small_model, request, request, 2, swapped) is None
