"""Places of a model with windows: layers that a walk does not read, and windows and sinks that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rigs.gpt_oss_forward import GptOssForward
from rigs.known_answers import forward, marks, small, walk
from rigs.live_answers import exchange
from rigs.llama_forward import Cache

from kvcheck.core.live.exchange import Question
from kvcheck.core.live.judge import SentPrompts, ServerSetting, Wrong, judge_round
from kvcheck.core.model.alphabet import TOO_MUCH, Alphabet
from kvcheck.core.model.answers import answers, reads

MODEL = small(family="gpt-oss", length=2048)
ALPHABET = Alphabet(MODEL)
PAGE = 16
SETTING = ServerSetting(alphabet=ALPHABET, page=PAGE, retracts=False, began_empty=True)
WINDOWED, FULL = (0, 2), (1, 3)


def question(ids: tuple[int, ...], number: int = 1) -> Question:
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, 62))


WALK = question(walk(MODEL, count=61))
MARKS = question(marks(MODEL, count=90))


def judged(asked: Question, tokens: tuple[int, ...], *others: Question) -> Wrong:
    """The one finding of an answer, in a round with others that are right."""
    exchanges = (exchange(asked, tokens=tokens), *map(exchange, others))
    (wrong,) = judge_round(SETTING, exchanges, SentPrompts().plus(ALPHABET, ())).wrong
    return wrong


@pytest.fixture(scope="module")
def model() -> GptOssForward:
    made = forward(MODEL)
    assert isinstance(made, GptOssForward)
    return made


@pytest.fixture(autouse=True)
def _no_faults(model: GptOssForward) -> Iterator[None]:
    yield
    for faults in (model.window_off, model.sink_times):
        faults.clear()


def said(model: GptOssForward, ids: tuple[int, ...], damage: Callable[[Cache], None]) -> tuple[int, ...]:
    """What a server answers whose cache is damaged after the prompt was read."""
    cache, tokens = Cache(), []
    logits = model.step(ids, cache)
    damage(cache)
    for _ in range(62):
        tokens.append(int(logits.argmax()))
        logits = model.step(tokens[-1:], cache)
    return tuple(tokens)


@pytest.mark.parametrize("off", [1, -1])
@pytest.mark.parametrize("layer", WINDOWED)
def test_a_window_off_by_one_names_the_layer_and_its_first_position(model: GptOssForward, layer: int, off: int) -> None:
    model.window_off[layer] = off
    wrong = judged(MARKS, said(model, MARKS.ids, lambda _: None))
    place = wrong.places[0]
    first = len(MARKS.ids) - MODEL.window
    assert (place.layer, place.page) == (layer, first // PAGE)
    assert "the first one of its window, or something before it" in place.why
    assert {each.layer for each in wrong.places} == {layer}


def zeroed(layer: int, page: int) -> Callable[[Cache], None]:
    """Damage: a page of the layer is empty."""

    def zero(cache: Cache) -> None:
        rows = slice(page * PAGE, (page + 1) * PAGE)
        cache.keys[layer][rows] = cache.values[layer][rows] = 0

    return zero


@pytest.mark.parametrize("layer", FULL)
@pytest.mark.parametrize("page", [1, 3])
def test_a_page_of_a_full_layer_is_named_by_the_walk(model: GptOssForward, layer: int, page: int) -> None:
    other = question(walk(MODEL, count=61, seed=2), 2)
    place = judged(WALK, said(model, WALK.ids, zeroed(layer, page)), other).places[0]
    assert (place.layer, place.page) == (layer, page)


@pytest.mark.parametrize("layer", range(4))
def test_a_page_that_a_layer_reads_is_named_by_the_marks(model: GptOssForward, layer: int) -> None:
    at = reads(ALPHABET, MARKS.ids, 5)[4].positions[layer]
    assert at is not None
    place = judged(MARKS, said(model, MARKS.ids, zeroed(layer, at // PAGE))).places[0]
    assert (place.layer, place.page) == (layer, at // PAGE)


def test_values_that_are_too_strong_are_those_of_a_windowed_layer() -> None:
    tokens = (*MARKS.expected[:5], TOO_MUCH, *[ALPHABET.lost(0, None)] * 56)
    places = judged(MARKS, tokens).places
    assert {(place.layer, place.page) for place in places} == {
        (layer, reads(ALPHABET, MARKS.ids, 6)[5].positions[layer] // PAGE)  # type: ignore[operator]
        for layer in WINDOWED
    }


@pytest.mark.parametrize("layer", WINDOWED)
def test_a_sink_that_is_lost_in_a_walk_is_no_page(model: GptOssForward, layer: int) -> None:
    """The answer names the layer. The walk reads no position there, so no page can be wrong."""
    model.sink_times[layer] = torch.inf
    tokens = said(model, WALK.ids, lambda _: None)
    assert ALPHABET.lost_at(tokens[0]) == (layer, None)
    assert judged(WALK, tokens).places == ()
