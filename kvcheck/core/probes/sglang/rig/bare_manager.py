"""Bare manager: the attributes of a transfer manager that is made without its start-up, in any release.

It has one rank and no optional feature. An attribute that is missing here ends the probe with its name.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvcheck.core.probes.frame.guard import fitted
from kvcheck.core.probes.frame.names import Names

STATE_CHUNK: Final = 4
"""Tokens between two states of a recurrent model. Without it, some releases read a model's configuration for it."""


def bare(kind: Any, attributes: Mapping[str, object]) -> Any:
    made = object.__new__(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def plain_manager() -> dict[str, Any]:
    ones = ("attn_tp_size", "attn_cp_size", "attn_dp_size", "state_tp_size", "pp_size", "dcp_size", "kv_shard_size")
    zeros = ("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "dcp_rank", "kv_shard_rank", "bootstrap_port")
    off = (
        "is_hybrid_mla_backend",
        "enable_custom_mem_pool",
        "enable_staging",
        "enable_trace",
        "enable_deferred_decode_kv_release",
        "enable_failed_session_probe",
        "defer_decode_allocation",
        "_stopped",
    )
    none = ("custom_mem_pool_type", "deferred_bootstrap", "_staging_handler", "_staging_ctx", "_dcp_pack_buffers")
    tables = (
        "decode_kv_args_table",
        "failed_session_probes",
        "failure_records",
        "prefill_response_tracker",
        "req_to_decode_prefix_len",
        "request_status",
        "required_prefill_response_num_table",
        "state_layout_rejections",
        "transfer_infos",
        "_deferred_ack_targets",
    )
    counters = ("session_failures", "_staging_outstanding")
    sets = ("failed_sessions", "state_strides_validated", "_deferred_ack_poisoned_rooms")
    return {
        **dict.fromkeys(ones, 1),
        **dict.fromkeys((*zeros, "max_transfer_batch_indices"), 0),
        **dict.fromkeys(off, False),
        **dict.fromkeys(none),
        **{name: {} for name in tables},
        **{name: defaultdict(int) for name in counters},
        **{name: set() for name in sets},
        **{name: threading.Lock() for name in ("session_lock", "failure_lock")},
        "_worker_threads": [],
        "_make_worker_recv": lambda socket, *_: socket.recv_multipart,
        "_start_heartbeat_checker_thread": lambda: None,
    }


def prepare(names: Names) -> None:
    _publish(names, {})


@contextmanager
def published(names: Names, **values: object) -> Iterator[Any]:
    """Yields the arguments, or None in a release without them."""
    try:
        yield _publish(names, values)
    finally:
        prepare(names)


def _publish(names: Names, values: dict[str, object]) -> Any:
    if not (names.has("server.args") and names.has("server.publish")):
        return None
    arguments = fitted(names["server.args"], {"model_path": "dummy", **values})
    arguments._mamba_cache_chunk_size = STATE_CHUNK
    names["server.publish"](arguments)
    return arguments
