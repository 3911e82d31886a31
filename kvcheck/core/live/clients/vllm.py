"""vLLM by /v1/completions with token ids, and the calls of its development mode.

Invariants:
- vLLM serves small priorities first, so the sign is inverted.
- `ignore_eos` is sent: vLLM reserves nothing for it.
- Forced preemption also empties the prefix cache: vLLM has one call for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcheck.core.live.clients.asking import (
    CompletionCall,
    Sample,
    converse,
    is_well,
    parse_samples,
    read_counters,
    read_metrics,
    read_or_none,
)
from kvcheck.core.live.clients.client import EngineRow, Reach, Trouble
from kvcheck.core.live.clients.openai import PATH, OpenAiClient, first_model, take_completion
from kvcheck.core.live.clients.reading import PartialAnswer, Unreadable, count_or_none, facts, text_or_none
from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import CallFailed, Http, one_line, parse_json

_DEV = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
_DETAILS = "start vLLM with --enable-prompt-tokens-details, and without --no-enable-prefix-caching"
_SMALL = "start vLLM with a smaller --num-gpu-blocks-override, so that the requests do not fit"
_OFFLOAD = "start vLLM with --kv-offloading-size and a smaller --num-gpu-blocks-override"
_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_STORES = ("disk", "external_unspecified")  # the latter: a connector of unknown kind
_STORAGE = f'{_SOURCE}{{source="{"|".join(_STORES)}"}}'
_HITS, _EXTERNAL = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
_BOTH_HITS = f"{_HITS} + {_EXTERNAL}"  # answers count those of a connector too
_LIFETIMES = "vllm:kv_block_lifetime_seconds_count"  # one for each page that is evicted
_EVICTED = f"{_LIFETIMES}*block_size"
_CONFIG = {
    "dtype": ("model_config", "dtype"),
    "quantization": ("model_config", "quantization"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "data_parallel_size": ("parallel_config", "data_parallel_size"),
    "attention_backend": ("attention_config", "backend"),
    "scheduling_policy": ("scheduler_config", "policy"),
}
"""Facts that vLLM reports in its development mode only -> (section, key) in vllm_config."""
_FACTS = ("cache_dtype", "enable_prefix_caching", "block_size", "num_gpu_blocks", "kv_offloading_size")


class VllmClient(OpenAiClient):
    engine = "vllm"
    has_salts = True
    counted: Mapping[str, tuple[str, ...]] = {
        "hit-token": (_BOTH_HITS, _HITS, "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total"),
        "host-hit": (f'{_SOURCE}{{source="host"}}',),
        "storage-hit": (_STORAGE,),
        "evict": (_EVICTED,),
        "retract": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    }
    computed: Mapping[str, tuple[str, ...]] = {
        "request": ("vllm:request_success_total",),
        "token": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    }
    said = frozenset({"hit", "hit-token", "lost-prefix"})
    flags: Mapping[str, str] = {
        "hit": _DETAILS,
        "hit-token": _DETAILS,
        "host-hit": _OFFLOAD,
        "storage-hit": "start vLLM with a connector of --kv-transfer-config that keeps pages on a disk",
        "evict": f"{_SMALL}, and with --kv-cache-metrics --kv-cache-metrics-sample 1.0",
        "lost-prefix": f"{_SMALL}, and with --enable-prompt-tokens-details",
        "retract": f"{_SMALL}; or {_DEV}, so that kvcheck can force it",
        "backup": "vLLM counts no tokens that it copies to the host; require host-hit instead",
        "load-back": "vLLM counts no tokens that it loads back; require host-hit instead",
        "transfer": "vLLM counts no requests that were transferred",
        "abort": "vLLM counts no requests that it aborted",
        "overtake": "start vLLM with --scheduling-policy priority",
    }

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach)
        self._page_size: int | None = None

    def served(self) -> Served:
        try:
            version = read_or_none(self._server, "/version") or {}
            card = first_model(self._server)
            cache = _cache_config(read_metrics(self._server))
            info = read_or_none(self._server, "/server_info?config_format=json") or {}
            config = _config(info)
            policy = config.get("scheduling_policy")
            return Served(
                engine="vllm",
                version=text_or_none(version.get("version"), "version"),
                model=text_or_none(card.get("id"), "id"),
                longest=count_or_none(card.get("max_model_len"), "max_model_len"),
                pool=_pool(cache),
                page=_number(cache[0].get("block_size")) if cache else None,
                has_host_tier=True if cache and _is_set(cache[0].get("kv_offloading_size")) else None,
                has_priorities=None if policy is None else policy == "priority",
                facts=(facts(cache[0], _FACTS) if cache else {}) | config,
            )
        except (CallFailed, Unreadable) as error:
            raise Trouble(one_line(f"{self._server.address}: {error}", 400)) from error

    def ask(self, sending: Sending) -> Answer:
        body: dict[str, object] = {
            "model": self._name(),
            "prompt": list(sending.question.ids),
            "max_tokens": len(sending.question.expected),
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": sending.rid,
            **({} if sending.is_timed else {"logprobs": max(1, sending.top), "return_tokens_as_token_ids": True}),
        }
        if sending.salt is not None:
            body["cache_salt"] = sending.salt
        if sending.priority is not None:
            body["priority"] = -sending.priority
        call = CompletionCall(
            server=self._server,
            path=PATH,
            body=body,
            streamed={**body, "stream": True, "stream_options": {"include_usage": True}},
            take=self._take,
            abort=lambda: self._abort(sending.rid),
        )
        return converse(call, sending.abort, PartialAnswer(), is_timed=sending.is_timed)

    def _take(self, event: Mapping[str, object], reply: PartialAnswer) -> None:
        """The answer's id is the request id behind "cmpl-"."""
        take_completion(event, reply, self.reach.token_of)
        reply.rid = text_or_none(event.get("id"), "id")

    def counters(self) -> Counters | None:
        """Adds sums and products of vLLM's counters, with the formula as name."""
        sources = [f'{_SOURCE}{{source="{name}"}}' for name in _STORES]
        read = read_counters(self.reach, [f'{_SOURCE}{{source="host"}}', *sources])
        if read is None:
            return None
        made = {_STORAGE: sum(read.get(name, 0.0) for name in sources)} if _SOURCE in read else {}
        if _EXTERNAL in read:
            made[_BOTH_HITS] = read.get(_HITS, 0.0) + read[_EXTERNAL]
        page = self._page()
        if page is not None and _LIFETIMES in read:
            made[_EVICTED] = read[_LIFETIMES] * page
        return {**read, **made}

    def is_alive(self) -> bool:
        return is_well(self._server, "/health")

    def retract(self) -> None:
        self._reset("/reset_prefix_cache?reset_running_requests=true")

    def flush(self) -> None:
        self._reset("/reset_prefix_cache")

    def _reset(self, path: str) -> None:
        try:
            answer = self._server.call("POST", path)
            value = parse_json(answer) if answer.strip() else {}
        except CallFailed as failure:
            raise Trouble(f"{failure}; {_DEV}" if failure.status == 404 else str(failure)) from failure
        except ValueError as error:
            raise Trouble(f"POST {path}: expected JSON or nothing, got neither") from error
        if isinstance(value, dict) and value.get("success") is False:
            raise Trouble(f"POST {path}: vLLM says that it did not succeed; requests may hold pages")

    def _abort(self, rid: str) -> None:
        """vLLM's own request ids contain the caller's."""
        body = {"request_ids": [f"cmpl-{rid}-0"]}
        try:
            self._server.call("POST", "/abort_requests", body)
        except CallFailed as failure:
            if failure.status not in (404, 405):
                raise
            # without the development mode; vLLM needs --enable-scale-out for it
            self._server.call("POST", "/inference/v1/abort_requests", body)

    def _page(self) -> int | None:
        with self._asking:
            if self._page_size is None:
                server = self.reach.metrics[0] if self.reach.metrics else self._server
                try:
                    cache = _cache_config(read_metrics(server))
                except CallFailed as failure:
                    raise Trouble(f"{server.address}: {failure}") from failure
                self._page_size = _number(cache[0].get("block_size")) if cache else None
            return self._page_size


def _cache_config(metrics: str | None) -> list[Mapping[str, str]]:
    samples: Iterable[Sample] = parse_samples(metrics or "")
    return [sample.labels for sample in samples if sample.name == "vllm:cache_config_info"]


def _pool(cache: list[Mapping[str, str]]) -> int | None:
    sizes = []
    for each in cache:
        pages, page = _number(each.get("num_gpu_blocks")), _number(each.get("block_size"))
        sizes.append(None if pages is None or page is None else pages * page)
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None


def _is_set(text: str | None) -> bool:
    return text not in (None, "None", "", "0", "0.0")


def _config(info: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    config = info.get("vllm_config")
    for name, (part, key) in _CONFIG.items():
        values = config.get(part) if isinstance(config, dict) else None
        said = facts(values, (key,)) if isinstance(values, dict) else {}
        if key in said:
            found[name] = said[key]
    return found


def _is_at(server: Http) -> bool:
    version = read_or_none(server, "/version")
    models = read_or_none(server, "/v1/models")
    cards = models.get("data") if models is not None else None
    owners = [card.get("owned_by") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    return "vllm" in owners and version is not None and "version" in version


VLLM = EngineRow(VllmClient, _is_at)
