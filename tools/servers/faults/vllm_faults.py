"""Faults in a running vLLM CPU worker: `--worker-extension-cls vllm_faults.Faults`, with this folder on PYTHONPATH.

A page of one layer is damaged between the write of a step and its attention, so that the prefill itself reads it too:
as where the write was lost. Or a rule of one layer's attention, its window or its sinks, is broken for requests that
began with a hit: as where a mask is counted from the wrong place behind a cached prefix.

Invariants:
- The engine's files stay as they are. Without an order every call passes through.
- A page whose content would not change is not counted as planted.
- vLLM's cache of a layer is [blocks, heads, page, 2 * dim] on a CPU: one block is one page of K and V.
- Attention with a broken rule is computed beside the right one, from the same cache. Rows of other requests keep the
  right result, and what no request's newest token differs in is not counted as planted.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from planting import LOG, ORDERS, RULES, SINK_LOST, SINK_TWICE, WINDOW_LONGER, WINDOW_SHORTER, Order, Planter, Row
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

LAYER = re.compile(r"\.layers\.(\d+)\.")
LEAST = 2.0**-6
"""A lookup returns digits of 1/2 or more. What differs by less is the softmax's rest."""
NO_SINK = -1e4


class Faults:
    """What vLLM mixes into its worker; loading this module has done the work."""


class _Worker:
    """Of this process: its model runner, which knows the requests of a step, and its planter."""

    runner: Any = None
    planter: Planter | None = None


_start = CPUModelRunner.__init__
_write = CPUAttentionBackendImpl.do_kv_cache_update
_attend = CPUAttentionBackendImpl.forward


def start(runner: Any, *arguments: Any, **named: Any) -> None:
    _start(runner, *arguments, **named)
    _Worker.runner = runner


def write(attention: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    found = LAYER.search(layer.layer_name)
    metadata = get_forward_context().attn_metadata
    if found is None or not metadata:  # a warm-up
        _write(attention, layer, key, value, kv_cache, slot_mapping)
        return

    def held(block: int) -> tuple[Any]:
        return (kv_cache[block].clone(),)

    def put(block: int, content: tuple[Any]) -> None:
        kv_cache[block].copy_(content[0])

    store = partial(_write, attention, layer, key, value, kv_cache, slot_mapping)
    _planter(kv_cache).around_write(int(found[1]), _rows(metadata[layer.layer_name]), store, held, put)


def attend(
    attention: Any,
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    attn_metadata: Any,
    output: Any,
    *scales: Any,
    **named: Any,
) -> Any:
    given = (attention, layer, query, key, value, kv_cache, attn_metadata)
    right = _attend(*given, output, *scales, **named)
    found = LAYER.search(layer.layer_name)
    if found is None or attn_metadata is None:  # a warm-up
        return right
    planter, rows = _planter(kv_cache), _rows(attn_metadata)
    order, behind = planter.order(), planter.behind_hits(rows)
    if order is None or order.kind not in RULES or order.layer != int(found[1]) or not behind:
        return right
    kept = attention.sliding_window, attention.sinks
    attention.sliding_window, attention.sinks = _broken_rule(order, *kept)
    try:
        wrong = torch.empty_like(output)
        _attend(*given, wrong, *scales, **named)
    finally:
        attention.sliding_window, attention.sinks = kept
    starts = attn_metadata.query_start_loc.tolist()
    for i in behind:
        last = starts[i + 1] - 1
        if float((wrong[last].float() - output[last].float()).abs().max()) > LEAST:
            planter.broken(order, rows[i])
        output[starts[i] : starts[i + 1]] = wrong[starts[i] : starts[i + 1]]
    return right


def _broken_rule(order: Order, window: int, sinks: Any) -> tuple[int, Any]:
    """Window and sinks of a layer as the order wants them; -1 is no window, and stays none."""
    longer = {WINDOW_LONGER: 1, WINDOW_SHORTER: -1}.get(order.kind, 0)
    if order.kind == SINK_LOST:
        sinks = torch.full_like(sinks, NO_SINK)
    elif order.kind == SINK_TWICE:
        sinks = sinks * 2
    return (window + longer if window > 0 else window), sinks


def _planter(kv_cache: Any) -> Planter:
    if _Worker.planter is None:
        _Worker.planter = Planter(Path(os.environ[ORDERS]), Path(os.environ[LOG]), int(kv_cache.shape[2]))
    return _Worker.planter


def _rows(metadata: Any) -> tuple[Row, ...]:
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    tables = metadata.block_table.tolist()
    return tuple(
        Row(
            request=name,
            computed=lengths[i] - (starts[i + 1] - starts[i]),
            length=lengths[i],
            blocks=tables[i],
        )
        for i, name in enumerate(_Worker.runner.input_batch.req_ids)
    )


CPUModelRunner.__init__ = start
CPUAttentionBackendImpl.do_kv_cache_update = write
CPUAttentionBackendImpl.forward = attend
