"""The written Llama weights give the known answers, in every dtype and shape, and none once the cache is damaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.known_answers import LEAST_MARGIN, first_wrong, forward, least_margin, marks, questions, small
from rigs.llama_forward import Cache, as_fp8

from kvcheck.core.model.alphabet import BEGIN, Alphabet
from kvcheck.core.model.answers import answers
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


def test_a_query_at_another_position_is_found_by_the_marks() -> None:
    model, request, cache = forward(small()), marks(small(), count=small().distance + 3), Cache()
    model.step(request[:-1], cache)
    said = int(model.step(request[-1:], cache, query_shift=1).argmax())
    assert said != answers(Alphabet(small()), request, 1)[0]
