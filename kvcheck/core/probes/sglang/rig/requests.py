"""Requests: makes SGLang's own request objects for a probe, and reads their fields in any release.

A renamed or moved attribute is found by trying its names, never by a version.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from kvcheck.core.probes.frame.calls import fitted
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig

REQUEST_NEEDS = ("request", "request.sampling")
VOCABULARY = 1 << 20


def make_request(rig: Rig, name: str, prompt: Sequence[int], outputs: int) -> Any:
    sampling = rig.names["request.sampling"](max_new_tokens=outputs, temperature=0)
    sampling.normalize(None)
    offered = {
        "rid": name,
        "origin_input_text": "",
        "origin_input_ids": [],
        "sampling_params": sampling,
        "vocab_size": VOCABULARY,
    }
    kind = type(fitted(rig.names["request"], offered).output_ids)  # a list, or an array in newer releases
    return fitted(
        rig.names["request"],
        {**offered, "origin_input_ids": array("q", prompt) if issubclass(kind, array) else list(prompt)},
    )


def make_committed_request(rig: Rig, committed: int) -> Any:
    """Make a request with KV of `committed` tokens, and one last token without KV."""
    request = make_request(rig, "probe", range(1, committed), 8)
    request.output_ids.extend((7, 8))
    if request.seqlen - 1 != committed:
        raise CannotDrive(f"a request of {committed + 1} tokens counts {request.seqlen}")
    return request


def record_of(request: Any) -> Any:
    """In some releases, row and state of a request lie in its `kv` record."""
    record = getattr(request, "kv", None)
    return record if hasattr(record, "req_pool_idx") else request


def row_of(request: Any) -> int | None:
    row = record_of(request).req_pool_idx
    return None if row is None else int(row)


def state_of(request: Any) -> int | None:
    slot = getattr(record_of(request), "mamba_pool_idx", None)
    return None if slot is None else int(slot)


def prefix_of(request: Any) -> int:
    return int(request.prefix_len) if hasattr(request, "prefix_len") else len(request.prefix_indices)


def end_of(request: Any) -> int:
    for name in ("extend_end", "extend_range.end", "fill_len"):
        try:
            return int(operator.attrgetter(name)(request))
        except AttributeError:
            continue
    return len(request.fill_ids)


def extend_to(request: Any, end: int) -> None:
    request.extend_end = request.fill_len = end
    request.fill_ids = request.origin_input_ids[:end]
    if hasattr(request, "set_extend_range"):
        request.set_extend_range(0, end)
