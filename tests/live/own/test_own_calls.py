"""Models of the user's own: what they are asked, and answers of models that are right or damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.server import Fake
from rigs.llama_forward import Cache, LlamaForward
from rigs.own_engine import OwnEngine
from rigs.own_models import copying_model, random_model
from safetensors.torch import load_file

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.clients import CLIENTS
from kvcheck.core.live.clients.client import Reach
from kvcheck.core.live.clients.openai import take_completion
from kvcheck.core.live.clients.reading import PartialAnswer, Unreadable
from kvcheck.core.live.clients.sglang import take
from kvcheck.core.live.clients.vllm import _config
from kvcheck.core.live.exchange import Answer, End, Exchange, Question, Sending
from kvcheck.core.live.http import Http, parse_address
from kvcheck.core.live.own.arms import hits_of, page_groups
from kvcheck.core.live.own.prompts import ANSWER, CODE, FRAME, Needles, OwnQuestions, ids_of, shortest_run
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.live.scenarios.scenario import Sizes

QUESTION = Question(number=0, ids=tuple(range(300, 340)), expected=(0,) * 6)
PAGE = 16


@pytest.mark.parametrize(
    ("engine", "salt", "top"), [("sglang", "extra_key", "top_logprobs_num"), ("vllm", "cache_salt", "logprobs")]
)
def test_a_salt_and_likely_tokens_are_asked_for(engine: str, salt: str, top: str) -> None:
    with Fake(None, engine, model=OwnEngine()) as server:
        client = CLIENTS.load(engine).make(Reach(server=Http(parse_address(server.url)), token_of=lambda word: None))
        plain = client.ask(Sending(question=QUESTION, rid="a"))
        salted = client.ask(Sending(question=QUESTION, rid="b", salt="s", top=5))
        again = client.ask(Sending(question=QUESTION, rid="c", salt="s", top=5))
    assert client.has_salts and plain.end is End.DONE
    assert salt not in server.bodies[0] and (server.bodies[1][salt], server.bodies[1][top]) == ("s", 5)
    assert (salted.cached, again.cached) == (0, 32), "the same salt shares, another one does not"
    assert salted.top is not None and salted.logprobs is not None and len(salted.top) == len(salted.tokens) == 6
    for token, logprob, step in zip(salted.tokens, salted.logprobs, salted.top, strict=True):
        assert len(step) == 3 and step[token] == logprob


@pytest.mark.parametrize("top", [[1], [[1]], [[[0.5]]], [[["x", 5, None]]], [[[-0.5, "x", None]]], "x", [[]] * 3])
def test_a_list_of_sglang_that_is_none_is_unreadable(top: object) -> None:
    meta: dict[str, Any] = {"output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]], "output_top_logprobs": top}
    with pytest.raises(Unreadable):
        take({"output_ids": [5, 6], "meta_info": meta}, PartialAnswer())


@pytest.mark.parametrize("top", [[1], [{"token_id:5": "x"}], "x", [{}] * 3])
def test_a_list_of_completions_that_is_none_is_unreadable(top: object) -> None:
    logprobs = {"token_logprobs": [-0.5, -0.25], "top_logprobs": top}
    choice = {"token_ids": [5, 6], "finish_reason": "length", "logprobs": logprobs}
    with pytest.raises(Unreadable):
        take_completion({"choices": [choice]}, PartialAnswer(), lambda word: None)


def test_words_without_an_id_and_numbers_without_an_end_are_left_out() -> None:
    reply = PartialAnswer()
    steps = [{"token_id:5": -0.5, "token_id:7": float("-inf")}, {"token_id:6": -0.25}]
    logprobs = {"token_logprobs": [-0.5, -0.25], "top_logprobs": steps}
    take_completion({"choices": [{"token_ids": [5, 6], "logprobs": logprobs}]}, reply, lambda word: None)
    assert reply.known_top() == ({5: -0.5}, {6: -0.25})
    other = PartialAnswer()
    logprobs["top_logprobs"] = [{" the": -0.5}, {"token_id:6": -0.25}]
    take_completion({"choices": [{"token_ids": [5, 6], "logprobs": logprobs}]}, other, lambda word: None)
    assert other.known_top() is None


def test_what_vllm_says_of_its_configuration_is_read_or_left_out() -> None:
    model, parallel = {"dtype": "bfloat16", "quantization": None}, {"tensor_parallel_size": 8}
    sections = {"model_config": model, "parallel_config": parallel}
    assert _config({"vllm_config": sections}) == {"dtype": "bfloat16", "tensor_parallel_size": 8}
    assert _config({}) == _config({"vllm_config": None}) == _config({"vllm_config": {"model_config": [1]}}) == {}


def test_requests_that_read_the_same_pages_are_one_group() -> None:
    def told(number: int, ids: tuple[int, ...], hit: int, tokens: tuple[int, ...] = ()) -> Exchange:
        question = Question(number=number, ids=ids, expected=(0,))
        answer = Answer(end=End.DONE, tokens=tokens, cached=hit)
        return Exchange(sending=Sending(question=question, rid=str(number)), answer=answer)

    one, two, three, four = (tuple(range(at, at + 40)) for at in (300, 400, 500, 600))
    asked = [
        told(1, one, 0),
        told(2, one[:32] + four, 32),
        told(3, two, 0),
        told(4, two[:16] + four, 0),  # begins alike and computed it itself
        told(5, three[:8], 0, three[8:40]),
        told(6, three, 16),  # read what an answer wrote
        told(7, three, 16),
        told(8, four, 2),  # a piece of a page
    ]
    hits = hits_of(asked, page=16)
    assert hits == [each.answer.cached for each in asked]
    assert page_groups(asked, hits, page=16) == {1: 1, 2: 1, 5: 5, 6: 5, 7: 5}
    assert page_groups(asked, hits, page=1) == page_groups(asked, hits, page=16), "less than a block groups nobody"
    assert page_groups(asked, hits, page=4096) == page_groups(asked, hits, page=16), "it hits less than it says"
    unsaid = [dataclasses.replace(each, answer=dataclasses.replace(each.answer, cached=None)) for each in asked]
    assert hits_of(unsaid, page=16) == [0, 32, 0, 16, 0, 32, 32, 0], "what a cache of whole pages has"


@pytest.mark.parametrize("name", LIVE_SCENARIOS.names())
@pytest.mark.parametrize("longest", [256, 2048])
def test_each_scenario_is_drawn_over_prompts_of_own_models(name: str, longest: int) -> None:
    sizes = Sizes(requests=20, concurrency=4, longest=longest, pool=4096)
    draw = LIVE_SCENARIOS.load(name).draw

    def drawn(answers: dict[int, tuple[int, ...]] | None = None) -> tuple[OwnQuestions, list[Question]]:
        source = OwnQuestions(ids_of(1000), longest=longest, names=5, answers=answers)
        return source, [order.question for order in draw(source, Rng(1), sizes).orders]

    source, questions = drawn()
    assert len(questions) >= 10
    for question in questions:
        assert len(question.ids) + len(question.expected) <= longest
        assert source.drawn(question.number) and len(source.code_asked(question)) == 8
    known, again = drawn({number: (number + 1,) for number in source.wanted})
    assert not known.wanted and [each.number for each in again] == [each.number for each in questions]


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
