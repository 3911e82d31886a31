"""The written GPT-OSS weights give the known answers, and none where a window, a sink or the cache is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rigs.gpt_oss_forward import GptOssForward
from rigs.known_answers import first_wrong, forward, least_margin, marks, questions, small, walk
from rigs.llama_forward import Cache, as_fp8

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.alphabet import TOO_MUCH, Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.gpt_oss import config, tensors

# Nats between the right token and the next one. It is 16, less what float32 sees of the norm's other registers.
LEAST_MARGIN = 15.9
FAMILY = {"family": "gpt-oss"}
PARAMETERS = small(**FAMILY)
ALPHABET = Alphabet(PARAMETERS)
WALK = walk(PARAMETERS, count=37)
MARKS = marks(PARAMETERS, count=PARAMETERS.farthest + 3)
COUNT = 37
LAYERS = range(PARAMETERS.layers)
WINDOWED, FULL = (0, 2), (1, 3)


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
        (torch.float16, False, False),
        (torch.bfloat16, True, False),
        (torch.bfloat16, True, True),
    ],
)
def test_every_token_is_the_known_one_in_every_dtype(dtype: torch.dtype, fp8: bool, fp8_queries: bool) -> None:
    model = forward(PARAMETERS, dtype, as_fp8 if fp8 else None)
    model.rounds_queries = fp8_queries
    for request in questions(PARAMETERS):
        assert least_margin(PARAMETERS, model, request, COUNT) > LEAST_MARGIN


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 1, "group": 3, "layers": 2},
        {"kv_heads": 8, "group": 8, "digits": 8, "layers": 6},
        {"kv_heads": 2, "group": 7, "layers": 5},
        {"kv_heads": 2, "layers": 12},
        {"head_dim": 128, "layers": 3},
        {"window": 4},
        {"window": 128, "distance": 2},
    ],
    ids=str,
)
def test_every_token_is_the_known_one_in_every_shape(changes: dict[str, Any]) -> None:
    parameters = small(**FAMILY, **changes)
    model = forward(parameters, torch.bfloat16)
    for request in questions(parameters):
        assert least_margin(parameters, model, request, 12) > LEAST_MARGIN


def test_a_prompt_that_is_read_in_pieces_has_the_same_answer() -> None:
    """A piece begins with keys of the cache, of which a windowed layer reads the last ones alone."""
    model = forward(PARAMETERS, torch.bfloat16)
    for request in questions(PARAMETERS):
        cache = Cache()
        for start in range(0, len(request), 11):
            logits = model.step(request[start : start + 11], cache)
        assert first_wrong(model, cache, logits, answers(ALPHABET, request, COUNT)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_rounded_that_does_not_rotate(dtype: torch.dtype) -> None:
    """A value in the cache is what its token holds, whatever was added to the residual before its layer."""
    model = forward(PARAMETERS, dtype)
    for request in questions(PARAMETERS):
        cache = Cache()
        model.step(request, cache)
        assert all(set(values.unique().tolist()) == {0.0, 1.0} for values in cache.values)


@pytest.mark.parametrize(("in_fp8", "least"), [(False, 11), (True, 8)], ids=["bf16", "queries and keys in fp8"])
def test_a_sink_stands_between_the_key_that_is_asked_for_and_all_others(in_fp8: bool, least: float) -> None:
    """In nats, over all keys of a long request at once, as if a window were as long as that."""
    length, back = 32768, 256
    parameters = small(**FAMILY, layers=2, kv_heads=2, length=length, window=back + 1, distance=back)
    model = forward(parameters, torch.bfloat16, as_fp8 if in_fp8 else None)
    positions, token = torch.arange(length), [Alphabet(parameters).mark(0, 0)]
    at = positions[back + 1 :: length // 64]
    for layer, head, asked in ((0, 0, back), (0, 1, back + 1), (1, 0, back), (1, 1, -1)):
        q, k, _ = model.projected(layer, model.embedded(token))
        keys = model.rounded(model.turn(k[:, :1].expand(length, 1, -1), positions))[:, 0].float()
        queries = model.turn(q[:, head : head + 1].expand(len(at), 1, -1), at)[:, 0]
        scores = (model.rounded(queries) if in_fp8 else queries).float() @ keys.T / parameters.head_dim**0.5
        scores -= model.w[f"model.layers.{layer}.self_attn.sinks"][head].float()
        found = (at - asked)[:, None] == positions
        assert float(scores[found].min()) > least
        if (layer, head) != (1, 0):  # there BEGIN stands between them, and the sink is low
            assert float(scores.masked_fill(found, -torch.inf).logsumexp(1).max()) < -least


@pytest.fixture(scope="module")
def model() -> GptOssForward:
    made = forward(PARAMETERS)
    assert isinstance(made, GptOssForward)
    return made


@pytest.fixture(autouse=True)
def _no_faults(model: GptOssForward) -> Iterator[None]:
    yield
    for faults in (model.window_off, model.ahead, model.sink_times):
        faults.clear()


def said(model: GptOssForward, request: tuple[int, ...]) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer; a token that is behind the last one stands in the cache already."""
    cache, expected = Cache(), answers(ALPHABET, request, COUNT)
    first = model.step(request, cache)
    tokens = [int(first.argmax()), *model.step(expected[:-1], cache, every=True).argmax(-1).tolist()]
    return next(((i, a) for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)


@pytest.mark.parametrize("off", [1, 2, 7, -1, -2])
@pytest.mark.parametrize("layer", WINDOWED)
def test_a_window_of_another_length_is_said_with_its_layer(model: GptOssForward, layer: int, off: int) -> None:
    model.window_off[layer] = off
    found = said(model, MARKS)
    assert found is not None and found[0] == 0
    assert ALPHABET.lost_at(found[1]) == (layer, None)


def test_of_several_windows_that_are_wrong_one_is_named(model: GptOssForward) -> None:
    model.window_off.update({0: 1, 2: 1})
    found = said(model, MARKS)
    assert found is not None and ALPHABET.lost_at(found[1]) in ((0, None), (2, None))


@pytest.mark.parametrize("layer", FULL)
def test_a_token_that_reads_behind_its_own_position_is_said_with_its_layer(model: GptOssForward, layer: int) -> None:
    model.ahead[layer] = 1
    found = said(model, MARKS)
    assert found is not None and ALPHABET.lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize("request_ids", [WALK, MARKS], ids=["walk", "marks"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_lost_sink_is_said_with_its_layer_by_both_tests(
    model: GptOssForward, layer: int, request_ids: tuple[int, ...]
) -> None:
    model.sink_times[layer] = torch.inf
    found = said(model, request_ids)
    assert found is not None and ALPHABET.lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize("times", [2.0, 1.4427, 0.6931])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_sink_of_another_strength_is_found_by_the_marks(model: GptOssForward, layer: int, times: float) -> None:
    """Log 2 and its inverse: what a softmax in powers of two multiplies scores by, and forgets for sinks."""
    model.sink_times[layer] = times
    found = said(model, MARKS)
    assert found is not None
    if layer in WINDOWED or times < 1:
        assert ALPHABET.lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_page_outside_every_window_may_hold_anything(model: GptOssForward, layer: int) -> None:
    """An engine frees such pages, and gives them to others. In a full layer they are read."""
    cache, expected = Cache(), answers(ALPHABET, MARKS, COUNT)
    logits = model.step(MARKS, cache)
    past = slice(0, len(MARKS) - PARAMETERS.window)
    cache.keys[layer][past], cache.values[layer][past] = cache.keys[layer][past].flip(0), 7.0
    assert (first_wrong(model, cache, logits, expected) is None) == (layer in WINDOWED)


def wrong_page(model: GptOssForward, request: tuple[int, ...], layer: int, change: Any) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer after `change(keys, values)` of the last places or marks."""
    cache = Cache()
    logits = model.step(request, cache)
    page = slice(len(request) - 20, len(request) - 4)
    change(cache.keys[layer][page], cache.values[layer][page])
    return first_wrong(model, cache, logits, answers(ALPHABET, request, COUNT))


def zero(k: torch.Tensor, v: torch.Tensor) -> None:
    k[:] = v[:] = 0


def values_zero(k: torch.Tensor, v: torch.Tensor) -> None:
    v[:] = 0


def half_the_keys(k: torch.Tensor, v: torch.Tensor) -> None:
    k *= 0.5


def moved(k: torch.Tensor, v: torch.Tensor) -> None:
    k[:], v[:] = k.roll(1, 0), v.roll(1, 0)


@pytest.mark.parametrize("layer", WINDOWED)
@pytest.mark.parametrize("change", [zero, values_zero, half_the_keys], ids=lambda change: change.__name__)
def test_a_wrong_page_of_a_windowed_layer_is_said_by_the_marks_and_read_by_no_walk(
    model: GptOssForward, change: Any, layer: int
) -> None:
    found = wrong_page(model, MARKS, layer, change)
    assert found is not None and ALPHABET.lost_at(found[1]) == (layer, None)
    assert wrong_page(model, WALK, layer, change) is None


@pytest.mark.parametrize("layer", FULL)
@pytest.mark.parametrize("change", [zero, half_the_keys], ids=lambda change: change.__name__)
def test_a_wrong_page_of_a_full_layer_is_said_by_both_tests(model: GptOssForward, change: Any, layer: int) -> None:
    for request in questions(PARAMETERS):
        found = wrong_page(model, request, layer, change)
        assert found is not None and ALPHABET.lost_at(found[1]) == (layer, None)


@pytest.mark.parametrize("layer", WINDOWED)
@pytest.mark.parametrize("head", [0, 3])
def test_values_that_are_too_strong_are_said_so(model: GptOssForward, layer: int, head: int) -> None:
    def twice(k: torch.Tensor, v: torch.Tensor) -> None:
        v[:, head] *= 2

    found = wrong_page(model, MARKS, layer, twice)
    assert found is not None and found[1] == TOO_MUCH


@pytest.mark.parametrize("layer", WINDOWED)
@pytest.mark.parametrize("head", [0, 3])
def test_a_head_that_finds_nothing_is_named(model: GptOssForward, layer: int, head: int) -> None:
    def lost(k: torch.Tensor, v: torch.Tensor) -> None:
        k[:, head] = 0

    found = wrong_page(model, MARKS, layer, lost)
    assert found is not None and ALPHABET.lost_at(found[1]) == (layer, head)


def test_layers_have_their_kinds_by_name() -> None:
    assert config(small(**FAMILY, layers=3))["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]


def test_one_query_head_of_a_kv_head_is_refused() -> None:
    with pytest.raises(UsageError, match="2 query heads or more; got --group 1"):
        next(iter(tensors(small(**FAMILY, group=1))))
