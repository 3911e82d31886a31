"""Engines with a client: a file and a row for each.

Invariants:
- An engine is detected by its answers, never by its host name. Rows are tried in order, the plainest last.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from kvcheck.core.base.registry import Registry
from kvcheck.core.live.clients.client import Client, EngineRow, Trouble
from kvcheck.core.live.http import CallFailed, Http

CLIENTS: Registry[EngineRow] = Registry(
    "engine",
    {
        "sglang": ("kvcheck.core.live.clients.sglang:SGLANG", "SGLang, by its own /generate."),
        "llamacpp": ("kvcheck.core.live.clients.llamacpp:LLAMACPP", "The server of llama.cpp, by /completion."),
        "vllm": ("kvcheck.core.live.clients.vllm:VLLM", "The server of vLLM, by /v1/completions with token ids."),
        "openai": ("kvcheck.core.live.clients.openai:OPENAI", "Any other server with /v1/completions."),
    },
)
PAIRS: Registry[Callable[..., Client]] = Registry(
    "pair of servers", {"sglang": "kvcheck.core.live.clients.sglang_pair:SglangPair"}
)
"""Constructed with the keywords prefill and decode: a Reach each."""


def detect(server: Http) -> str:
    try:
        for name in CLIENTS.names():
            if CLIENTS.load(name).is_at(server):
                return name
        server.get_json("/v1/models")  # raises the reason, for instance a missing key
    except CallFailed as failure:
        base = server.address.base
        path = f"; leave {base} out of the address" if base and failure.status == HTTPStatus.NOT_FOUND else ""
        raise Trouble(f"{server.address}: {failure}{path}") from failure
    raise Trouble(f"{server.address} answers, but as none of {', '.join(CLIENTS.names())}")
