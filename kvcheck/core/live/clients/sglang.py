"""SGLang by its native calls: a single server, or a router in front of several.

Invariants:
- `ignore_eos` is not sent: SGLang reserves all tokens of such a request at once and never retracts it for lack of room.
  No right answer contains the end token.
- SGLang acknowledges `/abort_request` before it aborts: tokens in progress may arrive after that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeVar

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
    text,
    text_or_none,
)
from kvcheck.core.live.exchange import Answer, Counters, Sending, Served, Tier
from kvcheck.core.live.http import CallFailed, Http, one_line

T = TypeVar("T")

_METRICS = "start SGLang with --enable-metrics"
_HOST = "start SGLang with --enable-hierarchical-cache --enable-metrics and a small --max-total-tokens"
_SMALL = "start SGLang with a smaller --max-total-tokens, so that the requests do not fit"
_FACTS = (
    *(
        "attention_backend",
        "chunked_prefill_size",
        "device",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "dtype",
    ),
    *("disaggregation_transfer_backend", "enable_metrics", "hicache_io_backend", "hicache_mem_layout", "hicache_ratio"),
    *("hicache_size", "hicache_storage_backend", "hicache_write_policy", "kv_cache_dtype", "max_running_requests"),
    *("schedule_conservativeness", "schedule_policy", "speculative_algorithm", "tp_size", "dp_size", "pp_size"),
)


class SglangClient:
    engine = "sglang"
    has_salts = True
    counted: Mapping[str, tuple[str, ...]] = {
        "hit-token": ("sglang:cached_tokens_total", "sglang:cached_tokens"),
        "host-hit": ('sglang:cached_tokens_total{cache_source="host"}',),
        "storage-hit": ('sglang:cached_tokens_total{cache_source="storage"}',),
        "evict": ("sglang:evicted_tokens_total", "sglang:evicted_tokens"),
        "retract": ("sglang:num_retracted_requests_total", "sglang:num_retracted_requests"),
        "backup": ("sglang:hicache_backup_tokens_total", "sglang:hicache_backup_tokens"),
        "load-back": ("sglang:load_back_tokens_total", "sglang:load_back_tokens"),
        "transfer": ("sglang:kv_transfer_latency_ms_count", "sglang:kv_transfer_total_mb_count"),
        "abort": ("sglang:num_aborted_requests_total", "sglang:num_aborted_requests"),
    }
    computed: Mapping[str, tuple[str, ...]] = {
        "request": ("sglang:num_requests_total", "sglang:num_requests"),
        "token": ("sglang:generation_tokens_total", "sglang:generation_tokens"),
    }
    said = frozenset({"hit", "hit-token", "host-hit", "storage-hit", "lost-prefix", "retract"})
    flags: Mapping[str, str] = {
        "hit": "start SGLang without --disable-radix-cache",
        "hit-token": "start SGLang without --disable-radix-cache",
        "host-hit": _HOST,
        "storage-hit": "start SGLang with --enable-hierarchical-cache --hicache-storage-backend file",
        "evict": f"{_METRICS} and a smaller --max-total-tokens",
        "lost-prefix": _SMALL,
        "retract": f"{_SMALL}, and with --schedule-conservativeness 0.1",
        "backup": f"{_HOST} --hicache-write-policy write_through",
        "load-back": _HOST,
        "transfer": "give the prefill and the decode server of a pair (--disaggregation-mode)",
        "abort": _METRICS,
        "overtake": "start SGLang with --enable-priority-scheduling",
    }

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._server = reach.server
        self._retracting = threading.Lock()
        self._low_first: bool | None = None

    def served(self) -> Served:
        info, model, models = self._read_info()
        if info is None and model is None:
            raise Trouble(f"{self._server.address} shows neither /server_info nor /model_info; is it SGLang?")
        return _served(self._server, info or {}, model or {}, models or {})

    def ask(self, sending: Sending) -> Answer:
        return converse(self.call_for(sending, {}), sending.abort, PartialAnswer(), is_timed=sending.is_timed)

    def call_for(self, sending: Sending, more: Mapping[str, object]) -> CompletionCall:
        """The call of /generate. more: further fields of the request, such as those of a pair (sglang_pair)."""
        question = sending.question
        body: dict[str, object] = {
            "input_ids": list(question.ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": len(question.expected)},
            "rid": sending.rid,
            **({} if sending.is_timed else {"return_logprob": True, "logprob_start_len": -1}),
            **more,
        }
        if sending.salt is not None:
            body["extra_key"] = sending.salt
        if sending.top:
            body["top_logprobs_num"] = sending.top
        if sending.priority is not None:
            body["priority"] = -sending.priority if self._serves_low_first() else sending.priority
        return CompletionCall(
            server=self._server,
            path="/generate",
            body=body,
            streamed={**body, "stream": True},
            take=take,
            abort=lambda: self._server.call("POST", "/abort_request", {"rid": sending.rid}),
        )

    def counters(self) -> Counters | None:
        return read_counters(self.reach, [name for names in self.counted.values() for name in names])

    def is_alive(self) -> bool:
        return is_well(self._server, "/health")

    def retract(self) -> None:
        with self._retracting:
            failed = None
            try:
                troubled(lambda: self._server.call("POST", "/pause_generation", {"mode": "retract"}))
            except Trouble as trouble:
                failed = trouble  # it may be paused all the same
            try:
                troubled(lambda: self._server.call("POST", "/continue_generation", {}))
            except Trouble as trouble:
                raise failed or Trouble(f"{trouble}; the server stays paused until this call succeeds") from trouble
            if failed is not None:
                raise failed

    def flush(self) -> None:
        troubled(lambda: self._server.call("POST", "/flush_cache?timeout=30"))

    def _read_info(self) -> tuple[Mapping[str, object] | None, ...]:
        try:
            return tuple(
                read_or_none(self._server, *paths)
                for paths in (("/server_info", "/get_server_info"), ("/model_info", "/get_model_info"), ("/v1/models",))
            )
        except CallFailed as failure:
            raise Trouble(one_line(f"{self._server.address}: {failure}", 400)) from failure

    def _serves_low_first(self) -> bool:
        if self._low_first is None:
            try:
                info = read_or_none(self._server, "/server_info", "/get_server_info") or {}
            except CallFailed:
                return False  # the request itself will fail with the reason
            self._low_first = info.get("schedule_low_priority_values_first") is True
        return self._low_first


def take(event: Mapping[str, object], reply: PartialAnswer) -> None:
    """Events hold all tokens so far or only new ones; completion_tokens distinguishes the two. Raises Unreadable."""
    meta = table(event.get("meta_info"), "meta_info")
    tokens = counts(event.get("output_ids"), "output_ids")
    written = meta.get("output_token_logprobs")
    logprobs = None if written is None else [_logprob(each) for each in rows(written, "output_token_logprobs")]
    top = _top(meta.get("output_top_logprobs"))
    total = count_or_none(meta.get("completion_tokens"), "completion_tokens")
    had = len(reply.tokens)
    if total is None or total == len(tokens):
        if tokens[:had] != reply.tokens:
            raise Unreadable("output_ids: tokens that had been sent before have changed")
        reply.add(tokens[had:], _after(logprobs, had), _after(top, had))
    elif total == had + len(tokens):
        new = len(tokens)
        reply.add(tokens, logprobs[-new:] if logprobs and new else None, top[-new:] if top and new else None)
    elif total != had:  # an aborted incremental stream repeats its last token
        raise Unreadable(f"completion_tokens: expected {had + len(tokens)}, the tokens that came, got {total}")
    reply.rid = text_or_none(meta.get("id"), "id")
    reply.prompt_tokens = count_or_none(meta.get("prompt_tokens"), "prompt_tokens") or reply.prompt_tokens
    reply.retractions = _newer(meta, "num_retractions", reply.retractions)
    reply.cached = _newer(meta, "cached_tokens", reply.cached)
    reply.cached_by = _cached_by(table_or_none(meta.get("cached_tokens_details"), "cached_tokens_details"), reply)
    _finish(table_or_none(meta.get("finish_reason"), "finish_reason"), reply)


def _logprob(row: object) -> float | None:
    written = rows(row, "output_token_logprobs")
    if not written:
        raise Unreadable("output_token_logprobs: expected [logprob, id, text], got an empty list")
    return logprob(written[0], "output_token_logprobs")


def _after(values: list[T] | None, had: int) -> list[T] | None:
    return None if values is None or len(values) < had else values[had:]


def _top(written: object) -> list[Mapping[int, float]] | None:
    if written is None:
        return None
    steps: list[Mapping[int, float]] = []
    for each in rows(written, "output_top_logprobs"):
        if each is None:
            return None
        found = {}
        for row in rows(each, "output_top_logprobs"):
            pair = rows(row, "output_top_logprobs")
            if len(pair) < 2:
                raise Unreadable("output_top_logprobs: expected [logprob, id, text], got a shorter list")
            if (value := logprob(pair[0], "output_top_logprobs")) is not None:
                found[count(pair[1], "output_top_logprobs")] = value
        steps.append(found)
    return steps


def _newer(meta: Mapping[str, object], name: str, before: int | None) -> int | None:
    value = count_or_none(meta.get(name), name)
    return before if value is None else value


def _cached_by(details: Mapping[str, object] | None, reply: PartialAnswer) -> dict[Tier, int] | None:
    """SGLang omits the table if nothing was cached."""
    if details is not None:
        return {
            tier: count(details[tier.value], f"cached_tokens_details.{tier.value}")
            for tier in Tier
            if details.get(tier.value) is not None
        }
    return dict.fromkeys((Tier.DEVICE, Tier.HOST), 0) if reply.cached == 0 else reply.cached_by


def _finish(reason: Mapping[str, object] | None, reply: PartialAnswer) -> None:
    if reason is None:
        return
    reply.finish = text(reason.get("type"), "finish_reason.type")
    status = count_or_none(reason.get("status_code"), "finish_reason.status_code")
    if reply.finish == "abort":
        reply.is_aborted = True
        if status is not None and status >= 400:
            reply.error = f"status {status}: {text_or_none(reason.get('message'), 'finish_reason.message')}"


def _served(
    server: Http, info: Mapping[str, object], model: Mapping[str, object], models: Mapping[str, object]
) -> Served:
    try:
        cards = rows(models.get("data", []), "data")
        card = table(cards[0], "data[0]") if cards else {}
        mode = text_or_none(info.get("disaggregation_mode") or model.get("disaggregation_mode"), "disaggregation_mode")
        port = count_or_none(info.get("disaggregation_bootstrap_port"), "disaggregation_bootstrap_port")
        name = model.get("served_model_name") or info.get("served_model_name") or card.get("id")
        return Served(
            engine="sglang",
            version=text_or_none(info.get("version"), "version"),
            model=text_or_none(name, "served_model_name"),
            longest=count_or_none(card.get("max_model_len") or info.get("context_length"), "max_model_len"),
            pool=count_or_none(info.get("max_total_num_tokens"), "max_total_num_tokens"),
            page=count_or_none(info.get("page_size"), "page_size"),
            has_host_tier=_is_true(info, "enable_hierarchical_cache"),
            has_storage=info["hicache_storage_backend"] is not None if "hicache_storage_backend" in info else None,
            has_priorities=_is_true(info, "enable_priority_scheduling"),
            mode=mode if mode in ("prefill", "decode") else None,
            bootstrap=(server.address.host, port) if mode == "prefill" and port else None,
            facts=facts(info, _FACTS),
        )
    except Unreadable as error:
        raise Trouble(f"{server.address}: what the server says of itself is not SGLang's: {error}") from error


def _is_true(info: Mapping[str, object], name: str) -> bool | None:
    value = info.get(name)
    return value if isinstance(value, bool) else None


def _is_at(server: Http) -> bool:
    model = read_or_none(server, "/model_info", "/get_model_info")
    return model is not None and "model_path" in model and "is_generation" in model


SGLANG = EngineRow(SglangClient, _is_at)
