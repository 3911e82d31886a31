"""What holds of the written weights of every family: known answers in every dtype and shape, and refused sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.known_answers import LEAST_MARGIN, forward, least_margin, questions, small
from rigs.llama_forward import Cache, Rounding, as_fp8

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model import FAMILIES

V3, V32, GPT_OSS, QWEN = ({"family": name} for name in ("deepseek-v3", "deepseek-v32", "gpt-oss", "qwen3-next"))
LLAMA_128 = {"kv_heads": 11, "digits": 11, "group": 1, "head_dim": 128}
DTYPES = (
    *((dtype, None, False) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    *((torch.bfloat16, as_fp8, queries) for queries in (False, True)),
)
TYPED = [
    (changes, *row)
    for changes in ({}, LLAMA_128, V3, V32, GPT_OSS, QWEN)
    for row in DTYPES
    if (row[0] is not torch.float16 or changes in ({}, LLAMA_128, GPT_OSS)) and not (row[2] and changes == V32)
]
SHAPES: tuple[dict[str, Any], ...] = (
    {"kv_heads": 1, "group": 8},
    {"kv_heads": 2, "group": 1},
    {"kv_heads": 8, "group": 4, "digits": 8, "layers": 5},
    {"kv_heads": 16, "group": 1, "digits": 16, "base": 2, "layers": 2},
    {"kv_heads": 32, "group": 1, "digits": 32, "base": 2, "layers": 3, "head_dim": 128},
    {"kv_heads": 2, "group": 7},
    {"kv_heads": 2, "group": 1, "layers": 40},
    {"head_dim": 128, "layers": 3},
    {"layers": 8, "kv_heads": 2},
    {"layers": 3, "kv_heads": 24, "group": 1, "head_dim": 128, "length": 64, "nodes": 64, "digits": 24, "base": 2}
    | {"distance": 20},  # as long as a request may be, in a head that digits fill: constants must not turn into digits
    V3 | {"kv_heads": 1},
    V3 | {"kv_heads": 16, "digits": 16, "base": 2, "layers": 3},
    V3 | {"kv_heads": 8, "digits": 8, "layers": 6},
    V3 | {"kv_heads": 2, "layers": 24},
    V3 | {"length": 4096, "nodes": 4096, "digits": 7, "distance": 256},
    V3 | {"kv_heads": 32, "digits": 32, "base": 2, "layers": 2},
    V32 | {"kv_heads": 1, "top_k": 4},
    V32 | {"kv_heads": 16, "digits": 16, "base": 2, "layers": 3},
    V32 | {"kv_heads": 2, "layers": 6, "base": 8, "digits": 4},
    V32 | {"length": 4096, "nodes": 4096, "digits": 7, "distance": 100, "top_k": 64},
    V32 | {"kv_heads": 32, "digits": 32, "base": 2, "layers": 2},
    V32 | {"top_k": 16},
    V32 | {"top_k": 64},
    GPT_OSS | {"kv_heads": 1, "group": 3, "layers": 2},
    GPT_OSS | {"kv_heads": 8, "group": 8, "digits": 8, "layers": 6},
    GPT_OSS | {"kv_heads": 2, "group": 7, "layers": 5},
    GPT_OSS | {"kv_heads": 2, "layers": 12},
    GPT_OSS | {"head_dim": 128, "layers": 3},
    GPT_OSS | {"window": 4},
    GPT_OSS | {"window": 128, "distance": 2},
    QWEN | {"kv_heads": 1, "group": 8},
    QWEN | {"kv_heads": 2, "layers": 10},
    QWEN | {"kv_heads": 16, "group": 1, "digits": 16, "base": 2},
    QWEN | {"kv_heads": 8, "group": 1, "digits": 8},
    QWEN | {"length": 4096, "nodes": 1024, "digits": 6, "distance": 256},
    QWEN | {"kv_heads": 1, "nodes": 16, "digits": 3, "distance": 2},
)
REFUSED = (
    ({"nodes": 1 << 16, "digits": 17}, "dimensions of a head"),
    (V3 | {"dtype": "fp16"}, "fp16 cannot hold"),
    (V3 | {"kv_heads": 64, "digits": 64, "base": 2}, "dimensions of a head; 125 hold"),
    (V3 | {"kv_heads": 57, "digits": 57, "base": 2}, "at most 56 digits"),
    (V3 | {"top_k": 64}, "no indexer"),
    (V32 | {"dtype": "fp16"}, "fp16 cannot hold"),
    (V32 | {"top_k": 3}, "from 4 to 511"),
    (V32 | {"top_k": 512}, "got 512"),
    (GPT_OSS | {"group": 1}, "2 query heads or more"),
    (QWEN | {"dtype": "fp16"}, "fp16 cannot hold"),
    (QWEN | {"layers": 3}, "attention in every 4th layer"),
    (QWEN | {"nodes": 20000, "digits": 9, "length": 512}, "16384 nodes at most"),
    (QWEN | {"kv_heads": 48, "digits": 48}, "dimensions; "),
)


@pytest.mark.parametrize(("changes", "dtype", "rounded", "rounds_queries"), TYPED)
def test_every_token_is_the_known_one_in_every_dtype(
    changes: dict[str, Any], dtype: torch.dtype, rounded: Rounding | None, rounds_queries: bool
) -> None:
    parameters = small(**changes)
    model = forward(parameters, dtype, rounded)
    model.rounds_queries = rounds_queries
    for request in questions(parameters):
        assert least_margin(parameters, model, request, 37) > LEAST_MARGIN


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_every_token_is_the_known_one_in_every_shape(changes: dict[str, Any]) -> None:
    parameters = small(**changes)
    model = forward(parameters, torch.bfloat16)
    for request in questions(parameters):
        assert least_margin(parameters, model, request, 12) > LEAST_MARGIN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", [{"kv_heads": 2}, {"kv_heads": 2, "layers": 40}, GPT_OSS], ids=str)
def test_nothing_is_rounded_that_does_not_rotate(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """A value in the cache is what its token holds, whatever was added to the residual before its layer."""
    parameters = small(**changes)
    model = forward(parameters, dtype)
    for request in questions(parameters):
        cache = Cache()
        model.step(request, cache)
        assert all(set(values.unique().tolist()) == {0.0, 1.0} for values in cache.values)


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_sizes_without_room_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parameters = small(**changes)
        for _ in FAMILIES.load(parameters.family).tensors(parameters):
            pass
