"""Weights of a known-answer model of the GPT-OSS architecture: a sliding window in every second layer, and sinks.

    windowed layer   half of its query heads look for the first position of the window, and return a bit of that mark;
                     the other half look for the position before it, which must not be visible
    full layer       half of its query heads look things up as Llama's do; the other half look for the position after
                     the last one, which must not be visible either

A sink takes the attention of a head that finds nothing; its value is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.decoder import MLP_WIDTH, config_around, tensors_around
from kvcheck.core.model.family import Family
from kvcheck.core.model.llama import content_room, slots_of
from kvcheck.core.model.lookups import (
    POSITION_NATS,
    Slots,
    ask_back,
    content_lookup,
    position_keys,
    position_lookup,
    rounded,
    value_rows,
)
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import NORMED, Registers, Weights
from kvcheck.core.model.rotary import THETA

EXPERTS = 2
WINDOW = 128
SINK_BITS = 8  # of bf16
# Of the peak of a position lookup. A sink that is half as large again wins that lookup; a smaller one takes nothing.
LOW_SINK = 0.75


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """As Llama's, but experts' are [in, out]. Raises UsageError also if a KV head has one query head only."""
    if parameters.group < 2:
        raise UsageError(f"a KV head of gpt-oss needs 2 query heads or more; got --group {parameters.group}")
    return tensors_around(parameters, partial(_layer, slots_of(parameters)))


def config(parameters: Parameters) -> dict[str, object]:
    kinds = [parameters.kind(layer) for layer in range(parameters.layers)]
    return config_around(parameters) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": parameters.head_dim,
        "attention_bias": True,
        "sliding_window": parameters.window,
        "layer_types": ["sliding_attention" if kind.is_windowed else "full_attention" for kind in kinds],
        "rope_theta": THETA,
        # YaRN by a factor of 1 changes nothing; vLLM reads its fields.
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": parameters.length,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "swiglu_limit": 7.0,
    }


def _layer(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    yield from _attention(slots, registers, layer)
    yield from _empty_experts(registers.width)


def _attention(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    p = registers.parameters
    first, second, key = (np.zeros((p.head_dim, registers.width), np.float32) for _ in range(3))
    asking, mark = p.group - p.group // 2, registers.kind("mark")
    sinks = np.full(p.group, rounded(slots.position_nats - POSITION_NATS / 2, SINK_BITS), np.float32)
    if p.kind(layer).is_windowed:
        position_keys(registers, slots, key)
        ask_back(slots, first, mark, p.distance_of(layer))
        ask_back(slots, second, mark, p.window)
        if layer == 0:
            ask_back(slots, first, registers.kind("place"), 1)
    else:
        content_lookup(registers, slots, layer, first, key)
        position_lookup(registers, slots, layer, first, key)
        ask_back(slots, second, mark, -1)
        sinks[:asking] = rounded(LOW_SINK * slots.position_nats, SINK_BITS)
    values = np.zeros((p.kv_heads, p.head_dim, registers.width), np.float32)
    outputs = np.zeros((registers.width, p.kv_heads, p.group, p.head_dim), np.float32)
    bits = [slots.bit_value(value) for value in range(2)]
    for kv_head in range(p.kv_heads):
        for source, target, dim in value_rows(registers, slots, layer, kv_head):
            values[kv_head, dim, source] = 1 / NORMED
            outputs[target, kv_head, :asking, dim] = 1 / asking
        lost = outputs[registers.lost(layer, kv_head), kv_head]
        # In a windowed layer a mark is "lost" until its bit is found.
        if p.kind(layer).is_windowed:
            lost[:asking, bits] = -1 / asking
        # Whatever it is that a second head finds: a place by its first digit, a mark by its bit, or BEGIN or GUARD. By
        # two, for a layer behind it that is lost by what the first heads then find shows that by one.
        lost[asking:, [*range(p.base), *bits, slots.lost_value]] = 2
    queries = np.concatenate([first] * asking + [second] * (p.group - asking))
    yield "self_attn.q_proj.weight", np.tile(queries, (p.kv_heads, 1))
    yield "self_attn.k_proj.weight", np.tile(key, (p.kv_heads, 1))
    yield "self_attn.v_proj.weight", values.reshape(-1, registers.width)
    yield "self_attn.o_proj.weight", outputs.reshape(registers.width, -1)
    for name, size in (("q", p.group), ("k", 1), ("v", 1)):
        yield f"self_attn.{name}_proj.bias", np.zeros(p.kv_heads * size * p.head_dim, np.float32)
    yield "self_attn.o_proj.bias", np.zeros(registers.width, np.float32)
    yield "self_attn.sinks", np.tile(sinks, p.kv_heads)


def _empty_experts(width: int) -> Iterator[tuple[str, Weights]]:
    for name, shape in (
        ("router.weight", (EXPERTS, width)),
        ("router.bias", (EXPERTS,)),
        ("experts.gate_up_proj", (EXPERTS, width, 2 * MLP_WIDTH)),
        ("experts.gate_up_proj_bias", (EXPERTS, 2 * MLP_WIDTH)),
        ("experts.down_proj", (EXPERTS, MLP_WIDTH, width)),
        ("experts.down_proj_bias", (EXPERTS, width)),
    ):
        yield f"mlp.{name}", np.zeros(shape, np.float32)


GPT_OSS = Family(tensors=tensors, config=config, slots=slots_of, room=content_room, window=WINDOW)
