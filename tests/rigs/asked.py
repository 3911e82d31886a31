"""Questions, and clients of an address that ask them."""

from __future__ import annotations

from rigs.known_answers import marks, small, walk

from kvcheck.core.live.clients import CLIENTS
from kvcheck.core.live.clients.client import Client, Reach
from kvcheck.core.live.exchange import AbortRequest, Answer, Question, Sending
from kvcheck.core.live.http import Http, parse_address
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers

ALPHABET = Alphabet(small())
WORDS = {word: token for token, word in enumerate(ALPHABET.words())}
SPOKEN = ("sglang", "vllm")
COUNT = 12
SILENCE_S = 0.4


def question(number: int, ids: tuple[int, ...]) -> Question:
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, COUNT))


QUESTIONS = [
    question(0, walk(small(), count=80)),
    question(1, walk(small(), count=82, seed=2)),
    question(2, marks(small(), count=90)),
    question(3, walk(small(), count=80)),
]


def http(url: str, *, key: str | None = None, silence_s: float = SILENCE_S) -> Http:
    return Http(parse_address(url), key=key, silence_s=silence_s)


def client(engine: str, url: str, *metrics: str, key: str | None = None, silence_s: float = SILENCE_S) -> Client:
    reach = Reach(server=http(url, key=key, silence_s=silence_s), metrics=tuple(map(http, metrics)), token_of=WORDS.get)
    return CLIENTS.load(engine).make(reach)


def ask(asked: Client, number: int = 0, *, abort: AbortRequest | None = None, priority: int | None = None) -> Answer:
    return asked.ask(Sending(question=QUESTIONS[number], rid=f"r{number}", abort=abort, priority=priority))


def wrong(answer: Answer, number: int) -> int:
    return sum(said != right for said, right in zip(answer.tokens, QUESTIONS[number].expected, strict=True))
