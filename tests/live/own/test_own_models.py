"""The small models that trials of `--own-model` serve: one recites, the other depends on each page.

Invariants:
- They are run by the tests' own forward pass, without a server.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rigs.llama_forward import Cache, LlamaForward
from rigs.own_models import copying_model, random_model
from safetensors.torch import load_file

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Question
from kvcheck.core.live.own.prompts import CODE, OwnQuestions, ids_of


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


def said(model: LlamaForward, question: Question, count: int) -> tuple[int, ...]:
    cache, tokens = Cache(), list[int]()
    logits = model.step(question.ids, cache)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.step(tokens[-1:], cache)
    return tuple(tokens)


def test_the_copying_model_recites_the_code_that_it_is_asked_for(tmp_path: Path) -> None:
    model = forward(copying_model(tmp_path / "copying"))
    for number in range(8):
        question, code = asked(2048, number)
        assert said(model, question, CODE) == code


def test_the_random_model_depends_on_each_token_of_a_prompt(tmp_path: Path) -> None:
    model = forward(random_model(tmp_path / "random"))
    question, _ = asked(1024, 1)
    whole = torch.log_softmax(model.step(question.ids, Cache()), -1)
    for at in (5, 60, 150):
        ids = [*question.ids]
        ids[at] = ids[at - 1]
        changed = torch.log_softmax(model.step(ids, Cache()), -1)
        assert float((whole - changed).abs().max()) > 0.05
