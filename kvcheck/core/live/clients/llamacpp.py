"""llama.cpp's server by /completion with token ids.

Invariants:
- Its cache is a slot's last request; a flush is a call for each slot.
- It has no abort call: the connection is closed instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcheck.core.live.clients.asking import CompletionCall, converse, is_well, read_counters, read_or_none, troubled
from kvcheck.core.live.clients.client import EngineRow, Reach, Trouble
from kvcheck.core.live.clients.reading import (
    PartialAnswer,
    Unreadable,
    count,
    count_or_none,
    counts,
    facts,
    logprob,
    rows,
    table,
    table_or_none,
    text_or_none,
)
from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import CallFailed, Http, one_line

_NOT_COUNTED = "llama.cpp does not say it"
_KINDS = ("host-hit", "storage-hit", "evict", "retract", "backup", "load-back", "transfer", "abort", "overtake")
_MOST_SLOTS = 4096


class LlamaCppClient:
    engine = "llamacpp"
    has_salts = True
    counted: Mapping[str, tuple[str, ...]] = {}
    computed: Mapping[str, tuple[str, ...]] = {"token": ("llamacpp:tokens_predicted_total",)}
    said = frozenset({"hit", "hit-token", "lost-prefix"})
    flags: Mapping[str, str] = {
        **dict.fromkeys(_KINDS, _NOT_COUNTED),
        "hit": "use a release of llama.cpp that answers timings.cache_n",
        "hit-token": "use a release of llama.cpp that answers timings.cache_n",
        "lost-prefix": "start llama.cpp with fewer slots (--parallel) than kvcheck sends requests at once",
    }

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._server = reach.server

    def served(self) -> Served:
        props = self._props()
        settings = props.get("default_generation_settings")
        return Served(
            engine="llamacpp",
            version=_text(props.get("build_info")),
            model=_text(props.get("model_alias")) or _text(props.get("model_path")),
            longest=_count(settings.get("n_ctx")) if isinstance(settings, dict) else None,
            has_priorities=False,
            facts=facts(props, ("total_slots", "build_info", "model_path")),
        )

    def ask(self, sending: Sending) -> Answer:
        body: dict[str, object] = {
            "prompt": list(sending.question.ids),
            "n_predict": len(sending.question.expected),
            "temperature": 0.0,
            "ignore_eos": True,
            "n_probs": 0 if sending.is_timed else max(1, sending.top),
            "return_tokens": True,
            "cache_prompt": sending.salt is None,
            "stream": False,
        }
        call = CompletionCall(
            server=self._server, path="/completion", body=body, streamed={**body, "stream": True}, take=take
        )
        return converse(call, sending.abort, PartialAnswer(), is_timed=sending.is_timed)

    def counters(self) -> Counters | None:
        return read_counters(self.reach)

    def is_alive(self) -> bool:
        return is_well(self._server, "/health")

    def retract(self) -> None:
        raise Trouble("llama.cpp has no call that retracts requests")

    def flush(self) -> None:
        slots = _count(self._props().get("total_slots")) or 1
        for slot in range(min(slots, _MOST_SLOTS)):
            troubled(lambda slot=slot: self._server.call("POST", f"/slots/{slot}?action=erase", {}))  # type: ignore[misc]

    def _props(self) -> Mapping[str, object]:
        try:
            props = read_or_none(self._server, "/props")
        except CallFailed as failure:
            raise Trouble(one_line(f"{self._server.address}: {failure}", 400)) from failure
        if props is None:
            raise Trouble(f"{self._server.address} shows no /props; is it llama.cpp's server?")
        return props


def take(event: Mapping[str, object], reply: PartialAnswer) -> None:
    """Add an answer of /completion, or an event of its stream with the tokens since the last one. Raises Unreadable."""
    tokens = counts(event.get("tokens"), "tokens")
    written = event.get("completion_probabilities")
    probabilities = None if written is None else rows(written, "completion_probabilities")
    values = (
        None
        if probabilities is None or len(probabilities) != len(tokens)
        else [logprob(table(each, "completion_probabilities").get("logprob"), "logprob") for each in probabilities]
    )
    reply.add(
        tokens, values, None if values is None or probabilities is None else [_top(each) for each in probabilities]
    )
    timings = table_or_none(event.get("timings"), "timings") or {}
    stop = event.get("stop")
    if type(stop) is not bool:
        raise Unreadable(f"stop: expected true or false, got {type(stop).__name__}")
    if stop:
        reply.finish = text_or_none(event.get("stop_type"), "stop_type") or "stop"
        reply.prompt_tokens = count_or_none(event.get("tokens_evaluated"), "tokens_evaluated")
        if timings.get("cache_n") is not None:
            reply.cached = count(timings["cache_n"], "timings.cache_n")


def _top(step: object) -> dict[int, float]:
    found = {}
    for row in rows(table(step, "completion_probabilities").get("top_logprobs", []), "top_logprobs"):
        each = table(row, "top_logprobs")
        if (value := logprob(each.get("logprob"), "top_logprobs")) is not None:
            found[count(each.get("id"), "top_logprobs.id")] = value
    return found


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _text(value: object) -> str | None:
    return one_line(value) if isinstance(value, str) and value else None


def _is_at(server: Http) -> bool:
    props = read_or_none(server, "/props")
    return props is not None and "default_generation_settings" in props


LLAMACPP = EngineRow(LlamaCppClient, _is_at)
