"""The small models that trials of `--own-model` serve: one recites, the other depends on each page."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rigs.llama_forward import Cache, LlamaForward
from rigs.own_models import copying_model, random_model
from safetensors.torch import load_file

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question
from kvcheck.core.live.own.prompts import ANSWER, CODE, FRAME, Needles, OwnQuestions, ids_of, shortest_run

PAGE = 16


def forward(folder: Path) -> LlamaForward:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    arrays = {name: each.float().numpy() for name, each in tensors.items()}
    attention = [(name, array * 0 if ".mlp." in name else array) for name, array in arrays.items()]  # it runs no MLP
    return LlamaForward(config, attention, torch.float32)


def asked(vocabulary: int, number: int) -> tuple[Question, tuple[int, ...]]:
    source = OwnQuestions(ids_of(vocabulary), longest=1024, names=number)
    question = source.put(Rng(number), source.walk(Rng(number + 50), 200), 32)
    return question, source.code_asked(question)


def said(
    model: LlamaForward, question: Question, count: int, *, page: int | None = None, other: Question | None = None
) -> tuple[int, ...]:
    """Its answer. page: of layer 1, that holds what it holds for the other request when the prompt's end is read."""
    cache, tokens = Cache(), list[int]()
    if page is not None and other is not None:
        foreign, at = Cache(), slice(page * PAGE, (page + 1) * PAGE)
        model.step(other.ids, foreign)
        model.step(question.ids[:-1], cache)
        for held, holds in ((cache.keys, foreign.keys), (cache.values, foreign.values)):
            held[1][at] = holds[1][at]
    logits = model.step(question.ids if page is None else question.ids[-1:], cache)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.step(tokens[-1:], cache)
    return tuple(tokens)


def test_the_copying_model_recites_the_code_that_it_is_asked_for(tmp_path: Path) -> None:
    model = forward(copying_model(tmp_path / "copying"))
    for number in range(8):
        question, code = asked(2048, number)
        assert said(model, question, CODE) == code


def test_a_page_of_another_request_is_recited_and_the_answer_is_another_one_in_any_case(tmp_path: Path) -> None:
    vocabulary, trials = 16384, 8
    model, ids = forward(copying_model(tmp_path / "copying", vocabulary=vocabulary)), ids_of(vocabulary)
    recited = 0
    for number in range(trials):
        source = OwnQuestions(ids, longest=1024, names=number)
        mine, other = (source.put(Rng(n), source.walk(Rng(n), 200), ANSWER) for n in (2 * number, 2 * number + 1))
        needles = Needles(length=shortest_run(ids.drawn, prompt_tokens=15_000, answer_tokens=10_000), drawn=ids.drawn)
        for each in (mine, other):
            needles.add(each, source.drawn(each.number))
        asked = next(at for at in range(len(mine.ids)) if mine.ids[at : at + FRAME] == mine.ids[-FRAME:])
        answered = said(model, mine, ANSWER, page=(asked + FRAME) // PAGE, other=other)
        assert answered[:CODE] != source.code_asked(mine)
        recited += needles.crosstalk(mine, answered) is not None
    assert recited >= trials - 1, "it leaves the code where the request itself has one of its tokens"


def test_the_random_model_depends_on_each_token_of_a_prompt(tmp_path: Path) -> None:
    model = forward(random_model(tmp_path / "random"))
    question, _ = asked(1024, 1)
    whole = torch.log_softmax(model.step(question.ids, Cache()), -1)
    for at in (5, 60, 150):
        ids = [*question.ids]
        ids[at] = ids[at - 1]
        changed = torch.log_softmax(model.step(ids, Cache()), -1)
        assert float((whole - changed).abs().max()) > 0.05
