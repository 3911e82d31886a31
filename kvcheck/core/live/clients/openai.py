"""A server with OpenAI's /v1/completions and no known calls beyond it.

Invariants:
- Only fields of the plain call are sent: such servers refuse others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise

from kvcheck.core.live.clients.asking import CompletionCall, converse, is_well, read_counters, read_or_none
from kvcheck.core.live.clients.client import EngineRow, Reach, Trouble
from kvcheck.core.live.clients.reading import (
    PartialAnswer,
    Unreadable,
    count,
    count_or_none,
    counts,
    logprob,
    rows,
    table,
    table_or_none,
    text_or_none,
)
from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import CallFailed, Http, one_line

PATH = "/v1/completions"
_WORD = re.compile(r"<[a-z]+>|[a-z]+[0-9]+")
_ID = "token_id:"
_NOT_SAID = "this server does not say it; name its engine if it is one that kvcheck knows"
_KINDS = ("host-hit", "storage-hit", "evict", "retract", "backup", "load-back", "transfer", "abort", "overtake")


def take_completion(event: Mapping[str, object], reply: PartialAnswer, token_of: Callable[[str], int | None]) -> None:
    """Add an answer, or an event of a stream, which holds the tokens since the last one. Raises Unreadable."""
    choices = rows(event.get("choices"), "choices")
    if len(choices) > 1:
        raise Unreadable(f"choices: expected one, got {len(choices)}")
    for written in choices:
        choice = table(written, "choices[0]")
        logprobs = table_or_none(choice.get("logprobs"), "logprobs") or {}
        tokens = _tokens(choice, logprobs, token_of)
        values = logprobs.get("token_logprobs")
        reply.add(
            tokens,
            None if values is None else [logprob(each, "token_logprobs") for each in rows(values, "token_logprobs")],
            _top(logprobs.get("top_logprobs"), token_of),
        )
        reply.finish = text_or_none(choice.get("finish_reason"), "finish_reason") or reply.finish
        reply.is_aborted = reply.finish in ("abort", "cancelled")
        if reply.finish == "error":
            reply.error = "the engine ended the answer with the reason error"
    usage = table_or_none(event.get("usage"), "usage")
    if usage is not None:
        reply.prompt_tokens = count_or_none(usage.get("prompt_tokens"), "prompt_tokens")
        details = table_or_none(usage.get("prompt_tokens_details"), "prompt_tokens_details") or {}
        reply.cached = count_or_none(details.get("cached_tokens"), "cached_tokens")


def _tokens(
    choice: Mapping[str, object], logprobs: Mapping[str, object], token_of: Callable[[str], int | None]
) -> list[int]:
    if choice.get("token_ids") is not None:
        return counts(choice["token_ids"], "token_ids")
    if logprobs.get("tokens") is not None:
        return [_token(each, token_of) for each in rows(logprobs["tokens"], "logprobs.tokens")]
    said = choice.get("text")
    if not isinstance(said, str):
        raise Unreadable("text: expected token_ids, logprobs.tokens or a text, got none of them")
    words = list(_WORD.finditer(said))
    ends = [(0, 0), *(word.span() for word in words), (len(said), len(said))]
    between = [said[before[1] : after[0]] for before, after in pairwise(ends)]
    strange = next((gap for gap in between if gap.strip()), None)
    if strange is not None:
        raise Unreadable(f"text: expected words of the model's tokenizer, got {one_line(strange, 40)!r}")
    return [_token(word[0], token_of) for word in words]


def _top(written: object, token_of: Callable[[str], int | None]) -> list[Mapping[int, float]] | None:
    if written is None:
        return None
    steps: list[Mapping[int, float]] = []
    for each in rows(written, "top_logprobs"):
        if each is None:
            return None
        found = {}
        for word, value in table(each, "top_logprobs").items():
            token = int(word.removeprefix(_ID)) if _is_id(word) else token_of(word.strip())
            number = logprob(value, "top_logprobs")
            if token is None:
                return None
            if number is not None:
                found[token] = number
        steps.append(found)
    return steps


def _is_id(word: str) -> bool:
    return word.startswith(_ID) and word.removeprefix(_ID).isdecimal() and len(word) < 32


def _token(word: object, token_of: Callable[[str], int | None]) -> int:
    if not isinstance(word, str):
        raise Unreadable("logprobs.tokens: expected words, got something else")
    if _is_id(word):
        return count(int(word.removeprefix(_ID)), "logprobs.tokens")
    token = token_of(word.strip())
    if token is None:
        raise Unreadable(f"a token: expected a word of the model's tokenizer, got {one_line(word, 40)!r}")
    return token


def first_model(server: Http) -> Mapping[str, object]:
    models = read_or_none(server, "/v1/models")
    if models is None:
        raise Unreadable("/v1/models: expected a list of models, got none")
    cards = rows(models.get("data"), "data")
    if not cards:
        raise Unreadable("/v1/models: expected at least one model, got none")
    return table(cards[0], "data[0]")


class OpenAiClient:
    engine = "openai"
    has_salts = False
    counted: Mapping[str, tuple[str, ...]] = {}
    computed: Mapping[str, tuple[str, ...]] = {}
    said = frozenset({"hit", "hit-token", "lost-prefix"})
    flags: Mapping[str, str] = {
        **dict.fromkeys(_KINDS, _NOT_SAID),
        **dict.fromkeys(
            ("hit", "hit-token", "lost-prefix"), "let the server report usage.prompt_tokens_details.cached_tokens"
        ),
    }

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._server = reach.server
        self._model: str | None = None
        self._asking = threading.Lock()

    def served(self) -> Served:
        try:
            card = first_model(self._server)
            return Served(
                engine="openai",
                model=text_or_none(card.get("id"), "id"),
                longest=count_or_none(card.get("max_model_len"), "max_model_len"),
                facts={"owned_by": one_line(owner)} if isinstance(owner := card.get("owned_by"), str) else {},
            )
        except (CallFailed, Unreadable) as error:
            raise Trouble(one_line(f"{self._server.address}: {error}", 400)) from error

    def ask(self, sending: Sending) -> Answer:
        body: dict[str, object] = {
            "model": self._name(),
            "prompt": list(sending.question.ids),
            "max_tokens": len(sending.question.expected),
            "temperature": 0.0,
            "logprobs": max(1, sending.top),
        }
        call = CompletionCall(
            server=self._server,
            path=PATH,
            body=body,
            streamed={**body, "stream": True, "stream_options": {"include_usage": True}},
            take=lambda event, reply: take_completion(event, reply, self.reach.token_of),
        )
        return converse(call, sending.abort, PartialAnswer(), is_timed=sending.is_timed)

    def counters(self) -> Counters | None:
        return read_counters(self.reach)

    def is_alive(self) -> bool:
        return is_well(self._server, "/v1/models")

    def retract(self) -> None:
        raise Trouble("a server by OpenAI's calls alone has no call that retracts requests")

    def flush(self) -> None:
        raise Trouble("a server by OpenAI's calls alone has no call that empties its prefix cache")

    def _name(self) -> str:
        with self._asking:
            if self._model is None:
                try:
                    name = first_model(self._server).get("id")
                except (CallFailed, Unreadable):
                    return ""  # the request itself will fail with the reason
                self._model = name if isinstance(name, str) else ""
            return self._model


def _is_at(server: Http) -> bool:
    models = read_or_none(server, "/v1/models")
    return models is not None and isinstance(models.get("data"), list)


OPENAI = EngineRow(OpenAiClient, _is_at)
