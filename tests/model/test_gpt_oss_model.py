"""The written GPT-OSS weights give the known answers, and none where a window, a sink or the cache is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rigs.gpt_oss_forward import GptOssForward
from rigs.known_answers import first_wrong, first_wrong_at_once, forward, lost, marks, small, walk
from rigs.llama_forward import Cache, as_fp8

from kvcheck.core.model.alphabet import TOO_MUCH, Alphabet
from kvcheck.core.model.answers import answers

FAMILY = {"family": "gpt-oss"}
PARAMETERS = small(**FAMILY)
ALPHABET = Alphabet(PARAMETERS)
WALK = walk(PARAMETERS, count=37)
MARKS = marks(PARAMETERS, count=PARAMETERS.farthest + 3)
COUNT = 37
LAYERS = range(PARAMETERS.layers)
WINDOWED, FULL = (0, 2), (1, 3)


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
    cache = Cache()
    return first_wrong_at_once(model, cache, model.step(request, cache), answers(ALPHABET, request, COUNT))


@pytest.mark.parametrize("off", [1, 2, 7, -1, -2])
@pytest.mark.parametrize("layer", WINDOWED)
def test_a_window_of_another_length_is_said_with_its_layer(model: GptOssForward, layer: int, off: int) -> None:
    model.window_off[layer] = off
    found = said(model, MARKS)
    assert found is not None and found[0] == 0
    assert lost(PARAMETERS, found) == (layer, None)


@pytest.mark.parametrize("layer", FULL)
def test_a_token_that_reads_behind_its_own_position_is_said_with_its_layer(model: GptOssForward, layer: int) -> None:
    model.ahead[layer] = 1
    assert lost(PARAMETERS, said(model, MARKS)) == (layer, None)


@pytest.mark.parametrize("request_ids", [WALK, MARKS], ids=["walk", "marks"])
@pytest.mark.parametrize("layer", LAYERS)
def test_both_tests_name_a_lost_sinks_layer(model: GptOssForward, layer: int, request_ids: tuple[int, ...]) -> None:
    model.sink_times[layer] = torch.inf
    assert lost(PARAMETERS, said(model, request_ids)) == (layer, None)


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


def wrong_page(model: GptOssForward, request: tuple[int, ...], layer: int, change: Change) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer after `change(keys, values)` of the last places or marks."""
    cache = Cache()
    logits = model.step(request, cache)
    page = slice(len(request) - 20, len(request) - 4)
    change(cache.keys[layer][page], cache.values[layer][page])
    return first_wrong(model, cache, logits, answers(ALPHABET, request, COUNT))


Change = Callable[[torch.Tensor, torch.Tensor], object]
CHANGES: dict[str, Change] = {
    "zero": lambda k, v: (k.zero_(), v.zero_()),
    "half the keys": lambda k, _v: k.mul_(0.5),
    "values zero": lambda _k, v: v.zero_(),
}


@pytest.mark.parametrize("layer", WINDOWED)
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_page_of_a_windowed_layer_is_said_by_marks_alone(model: GptOssForward, change: str, layer: int) -> None:
    assert lost(PARAMETERS, wrong_page(model, MARKS, layer, CHANGES[change])) == (layer, None)
    assert wrong_page(model, WALK, layer, CHANGES[change]) is None


@pytest.mark.parametrize("request_ids", [WALK, MARKS], ids=["walk", "marks"])
@pytest.mark.parametrize("layer", FULL)
@pytest.mark.parametrize("change", ["zero", "half the keys"])
def test_a_wrong_page_of_a_full_layer_is_said_by_both_tests(
    model: GptOssForward, change: str, layer: int, request_ids: tuple[int, ...]
) -> None:
    assert lost(PARAMETERS, wrong_page(model, request_ids, layer, CHANGES[change])) == (layer, None)


@pytest.mark.parametrize("layer", WINDOWED)
@pytest.mark.parametrize("head", [0, 3])
def test_a_head_that_is_too_strong_or_finds_nothing_is_said_so(model: GptOssForward, layer: int, head: int) -> None:
    strong = wrong_page(model, MARKS, layer, lambda _k, v: v[:, head].mul_(2))
    assert strong is not None and strong[1] == TOO_MUCH
    assert lost(PARAMETERS, wrong_page(model, MARKS, layer, lambda k, _v: k[:, head].zero_())) == (layer, head)
