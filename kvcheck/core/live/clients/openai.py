"""A server with OpenAI's /v1/completions and no known calls beyond it.

Invariants:
- Only fields of the plain call are sent: such servers refuse others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvcheck.core.live.clients.asking import Call, converse, is_well, read_counters, read_or_none
from kvcheck.core.live.clients.client import Engine, Reach, Trouble
from kvcheck.core.live.clients.completions import PATH, first_model, take_completion
from kvcheck.core.live.clients.reading import Reply, Unreadable, count_or_none, text_or_none
from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import CallFailed, Http, one_line

_NOT_SAID = "this server does not say it; name its engine if it is one that kvcheck knows"
_KINDS = ("host-hit", "storage-hit", "evict", "retract", "backup", "load-back", "transfer", "abort", "overtake")


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
        call = Call(
            server=self._server,
            path=PATH,
            body=body,
            streamed={**body, "stream": True, "stream_options": {"include_usage": True}},
            take=lambda event, reply: take_completion(event, reply, self.reach.token_of),
        )
        return converse(call, sending.abort, Reply(), is_timed=sending.is_timed)

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


OPENAI = Engine(OpenAiClient, _is_at)
