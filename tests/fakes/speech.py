"""What SGLang and vLLM say over HTTP: their calls, answers, events and counters, over one model of an engine.

Fields are those of SGLang 0.5.23 and vLLM 0.32.0, as far as kvcheck reads them.
"""

from __future__ import annotations

from typing import Any

from rigs.model_engine import Job, ModelEngine

KEY = "a-secret-key"
LOGPROB = -2.4e-07
NAMES = {"hits": "cached_tokens", "evicted": "evicted_tokens", "aborted": "num_aborted_requests"}
NAMES |= {"requests": "num_requests", "tokens": "generation_tokens"}


class Speech:
    """One engine's. mode: of a pair."""

    name: str
    path: str

    def __init__(self, model: ModelEngine, mode: str) -> None:
        self.model, self.mode = model, mode

    def call(self, path: str, body: dict[str, Any]) -> object:
        """What a call besides requests does, and its answer: a text, a value, (status, value), or None for no call."""
        card = {"id": "m", "owned_by": self.name, "max_model_len": self.model.longest}
        if path in ("/health", "/metrics", "/v1/models"):
            return {"/health": "", "/metrics": self.metrics()}.get(path, {"data": [card]})
        return self.own_call(path, body)

    def own_call(self, path: str, body: dict[str, Any]) -> object:
        raise NotImplementedError

    def metrics(self) -> str:
        raise NotImplementedError

    def event(self, rid: str, job: Job, tokens: list[int], new: int, finish: str | None) -> dict[str, Any]:
        """An answer, or an event of a stream. tokens: all so far; new: how many since the last event."""
        raise NotImplementedError


class Sglang(Speech):
    """SGLang's native calls."""

    name, path = "sglang", "/generate"

    def own_call(self, path: str, body: dict[str, Any]) -> object:
        if path == "/pause_generation":
            self.model.going.clear()
            self.model.retract()
        elif path == "/continue_generation":
            self.model.going.set()
        elif path == "/abort_request":
            self.model.abort(body["rid"])
        elif path == "/flush_cache?timeout=30":
            return "Cache flushed.\n" if self.model.flush() else (400, "Flush cache failed.\n")
        elif path == "/model_info":
            return {"model_path": "/m", "served_model_name": "m", "is_generation": True}
        elif path == "/server_info":
            sizes = {"max_total_num_tokens": self.model.pool, "page_size": self.model.page, "api_key": KEY}
            tiers = {"enable_hierarchical_cache": False, "hicache_storage_backend": None}
            pair = {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": 8998}
            return {"version": "0.5.23", "enable_priority_scheduling": True, **sizes, **tiers, **pair}
        else:
            return None
        return {"status": "ok"}

    def metrics(self) -> str:
        count = self.model.counters()  # a counter appears with its first event
        return f"sglang:max_total_num_tokens {self.model.pool}\n" + "".join(
            f'sglang:{NAMES[k]}_total{{tp_rank="0"}} {count[k]}\n' for k in NAMES if count[k]
        )

    def event(self, rid: str, job: Job, tokens: list[int], new: int, finish: str | None) -> dict[str, Any]:
        cached = {} if job.cached is None else {"cached_tokens": job.cached}
        meta = {
            **{"id": rid, "prompt_tokens": len(job.ids), "completion_tokens": len(tokens), **cached},
            "finish_reason": finish and {"type": finish, "status_code": None},
            "cached_tokens_details": {"device": job.cached, "host": 0} if job.cached else None,
            "num_retractions": job.retractions,
        }
        if job.top is not None:
            values = _logprobs(job, tokens)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(values, tokens, strict=True)]
            if job.top:
                steps = job.top[: len(tokens)]
                meta["output_top_logprobs"] = [[[step[token], token, None] for token in step] for step in steps]
        return {"text": "", "output_ids": tokens, "meta_info": meta}


class Vllm(Speech):
    """vLLM's completions, and its calls of the development mode."""

    name, path = "vllm", "/v1/completions"

    def own_call(self, path: str, body: dict[str, Any]) -> object:
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/abort_requests":
            for name in body["request_ids"]:
                self.model.abort(name.removeprefix("cmpl-").removesuffix("-0"))
            return {"status": "aborted"}
        if path == "/reset_prefix_cache?reset_running_requests=true":
            self.model.retract()
            return {"success": True}
        return {"success": self.model.flush()} if path == "/reset_prefix_cache" else None

    def metrics(self) -> str:
        count, pool, page = self.model.counters(), self.model.pool, self.model.page
        return (
            f'vllm:cache_config_info{{block_size="{page}",num_gpu_blocks="{pool // page}",cache_dtype="auto"}} 1.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {count["hits"]}\n'
            f'vllm:request_success_total{{finished_reason="length"}} {count["requests"]}\n'
            f"vllm:generation_tokens_total {count['tokens']}\n"
            f"vllm:num_preemptions_total {count['retracted']}\n"
            f"vllm:kv_block_lifetime_seconds_count {count['evicted'] // page}\n"
        )

    def event(self, rid: str, job: Job, tokens: list[int], new: int, finish: str | None) -> dict[str, Any]:
        fresh = tokens[len(tokens) - new :]
        values = _logprobs(job, tokens)[len(tokens) - new :]
        logprobs: dict[str, Any] = {"tokens": [f"token_id:{token}" for token in fresh], "token_logprobs": values}
        if job.top is None:
            del logprobs["token_logprobs"]
        elif job.top:
            steps = job.top[len(tokens) - new : len(tokens)]
            logprobs["top_logprobs"] = [{f"token_id:{token}": step[token] for token in step} for step in steps]
        choice = {"index": 0, "text": "", "token_ids": fresh, "logprobs": logprobs, "finish_reason": finish}
        details = None if job.cached is None else {"cached_tokens": job.cached}
        usage = {"prompt_tokens": len(job.ids), "prompt_tokens_details": details}
        return {"id": f"cmpl-{rid}", "choices": [choice], "usage": usage if finish else None}


def _logprobs(job: Job, tokens: list[int]) -> list[float]:
    """Of each token."""
    return [step[token] for step, token in zip(job.top, tokens, strict=False)] if job.top else [LOGPROB] * len(tokens)


SPEAKS: dict[str, type[Speech]] = {"sglang": Sglang, "vllm": Vllm}
