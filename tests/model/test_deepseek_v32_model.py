"""The written DeepSeek V3.2 weights: what is looked up ranks first in the indexer, and a wrong index row loses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.indexed_forward import IndexedForward, as_fp8_with_scales, hadamard_as_fp8
from rigs.known_answers import (
    LEAST_MARGIN,
    PAGE,
    first_wrong_at_once,
    forward,
    least_margin,
    lost,
    marks,
    questions,
    small,
    walk,
)
from rigs.llama_forward import Cache, Rounding, as_fp8

from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.answers import answers, mark_positions, reads
from kvcheck.core.model.parameters import Parameters

FAMILY = {"family": "deepseek-v32"}
COUNT = 37


def indexed(
    parameters: Parameters, dtype: torch.dtype = torch.float32, rounded: Rounding | None = None
) -> IndexedForward:
    """The model with those parameters, run by the tests' own forward pass."""
    made = forward(parameters, dtype, rounded)
    assert isinstance(made, IndexedForward)
    return made


@pytest.fixture(scope="module")
def model() -> IndexedForward:
    return indexed(small(**FAMILY))


@pytest.mark.parametrize("index_rounded", [as_fp8_with_scales, hadamard_as_fp8])
def test_every_token_is_the_known_one_where_index_rows_are_in_fp8_too(index_rounded: Rounding) -> None:
    parameters = small(**FAMILY)
    made = indexed(parameters, torch.bfloat16, as_fp8)
    made.index_rounded = index_rounded
    for request in questions(parameters):
        assert least_margin(parameters, made, request, COUNT) > LEAST_MARGIN


def index_scores(model: IndexedForward, tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """What the indexer of each layer says of each position, [tokens, tokens], as the last step of a prefill has it."""
    scores: list[torch.Tensor] = []
    plain = model.indexed

    def noted(layer: int, x: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, weights = plain(layer, x, past)
        scores.append(torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, k).relu()))
        return q, k, weights

    model.indexed = noted  # type: ignore[method-assign]
    try:
        model.step(tokens, Cache())
    finally:
        del model.indexed
    return scores


@pytest.mark.parametrize("index_rounded", [lambda values: values, as_fp8_with_scales, hadamard_as_fp8])
@pytest.mark.parametrize("is_walk", [True, False], ids=["walk", "marks"])
def test_what_is_looked_up_and_the_header_lead_strictly(is_walk: bool, index_rounded: Rounding) -> None:
    """By a tenth of the score of those that follow, at each position that asks: no tie at the top."""
    parameters = small(**FAMILY)
    made, alphabet = indexed(parameters), Alphabet(parameters)
    made.index_rounded = index_rounded
    asked = questions(parameters)[0 if is_walk else 1]
    answer = answers(alphabet, asked, 60)
    tokens = (*asked, *answer)
    read: list[tuple[int | None, ...]] = [mark_positions(parameters, len(asked) - 1 + step) for step in range(60)]
    copies = {2, 2 + COUNT}  # of the first place, which closes the walk: layer 0 finds both
    if is_walk:
        read = [each.positions for each in reads(alphabet, asked, 60)]
    for layer, scores in enumerate(index_scores(made, tokens)):
        for step, positions in enumerate(read):
            right, others = positions[layer], scores[len(asked) - 1 + step, : len(asked) + step].clone()
            assert right is not None
            header, found = others[: len(HEADER)].min(), float(others[right])
            others[: len(HEADER)] = others[right] = 0
            if is_walk and layer == 0 and right in copies:
                others[list(copies)] = 0
            assert header > 2 * found > 2.2 * others.max(), (layer, step)


def said(
    model: IndexedForward, parameters: Parameters, request: tuple[int, ...], layer: int, change: Any
) -> tuple[int, int] | None:
    """(step, token) of the first wrong answer after `change(index keys, those of another request)`, right ones fed
    back."""
    cache, foreign = Cache(), Cache()
    logits = model.step(request, cache)
    model.step(walk(parameters, count=COUNT, seed=2), foreign)
    change(cache.index[layer], foreign.index[layer])
    return first_wrong_at_once(model, cache, logits, answers(Alphabet(parameters), request, COUNT))


DAMAGE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "zero": lambda k, _other: k[PAGE].zero_(),
    "half": lambda k, _other: k[PAGE].mul_(0.5),
    "twice": lambda k, _other: k[PAGE].mul_(2),
    "foreign": lambda k, other: k[PAGE].copy_(other[PAGE]),
}


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("change", DAMAGE)
def test_a_walk_that_loses_a_page_by_index_rows_says_the_layer(model: IndexedForward, change: str, layer: int) -> None:
    parameters = small(**FAMILY)
    found = said(model, parameters, walk(parameters, count=COUNT, seed=1), layer, DAMAGE[change])
    assert lost(parameters, found) == (layer, None)


@pytest.mark.parametrize("layer", range(4))
def test_index_rows_at_another_position_are_found_by_the_marks_alone(model: IndexedForward, layer: int) -> None:
    def moved(k: torch.Tensor, _other: torch.Tensor) -> None:
        k[PAGE] = model.turn_index(k[PAGE, None], torch.ones(16))[:, 0]

    parameters = small(**FAMILY)
    assert said(model, parameters, walk(parameters, count=COUNT, seed=1), layer, moved) is None
    found = said(model, parameters, marks(parameters, count=parameters.distance + 3), layer, moved)
    assert lost(parameters, found) == (layer, None)


@pytest.mark.parametrize("change", ["zero", "half", "twice"])
def test_marks_lose_a_page_by_its_index_rows_too(model: IndexedForward, change: str) -> None:
    parameters = small(**FAMILY)
    found = said(model, parameters, marks(parameters, count=parameters.distance + 3), 2, DAMAGE[change])
    assert lost(parameters, found) == (2, None)


def test_a_stale_row_of_one_token_is_found_but_where_it_is_picked_by_chance() -> None:
    """Then attention reads the right latent. 16 tokens of two layers, one at a time: most are found, some are not."""
    parameters = small(**FAMILY)
    made, alphabet = indexed(parameters), Alphabet(parameters)
    request, other = (walk(parameters, count=COUNT, seed=seed) for seed in (1, 2))
    expected = answers(alphabet, request, COUNT)
    read = [each.positions for each in reads(alphabet, request, COUNT)]
    plain, cache, foreign_cache = made.hidden, Cache(), Cache()
    made.step(request, cache)
    made.step(other, foreign_cache)
    outcomes = []
    hidden: dict[int, torch.Tensor] = {}
    made.hidden = lambda layer, *given: hidden.setdefault(layer, plain(layer, *given))  # type: ignore[method-assign]
    for layer, token in [(layer, token) for layer in (1, 3) for token in range(16, 32)]:
        hidden.clear()
        damaged = cache.copy()
        damaged.index[layer][token] = foreign_cache.index[layer][token]
        told = made.step([request[-1], *expected[:-1]], _without_last(damaged), every=True).argmax(-1).tolist()
        hid = [bool(hidden[layer][step, token]) for step, at in enumerate(read) if at[layer] == token]
        assert (told == list(expected)) == (not any(hid)), (layer, token)
        outcomes.append(any(hid))
    assert 24 <= sum(outcomes) < len(outcomes)


def _without_last(cache: Cache) -> Cache:
    """The cache before the last token, which is read again."""
    return Cache(*([each[:-1] for each in held] for held in (cache.keys, cache.values, cache.index)))


def test_rows_of_twice_the_strength_push_out_no_other_where_the_top_k_holds_them_all(model: IndexedForward) -> None:
    """Scores grow with a key, so such a row is picked all the more; what is looked up is picked beside them."""
    parameters = small(**FAMILY, top_k=32)
    request = walk(parameters, count=COUNT, seed=1)
    assert said(indexed(parameters), parameters, request, 1, DAMAGE["twice"]) is None
    assert said(model, small(**FAMILY), request, 1, DAMAGE["twice"]) is not None


def test_an_indexer_that_turns_neighbours_instead_of_halves_is_found(model: IndexedForward) -> None:
    """Releases differ in this, and each is consistent with itself: only what is known beforehand tells."""
    parameters = small(**FAMILY)
    wrong = indexed(parameters)

    def neighbours(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat([wrong.turn(x[..., :64], positions), x[..., 64:]], -1)

    wrong.turn_index = neighbours  # type: ignore[method-assign]
    assert least_margin(parameters, wrong, marks(parameters, count=parameters.distance + 3), 12) < 0
