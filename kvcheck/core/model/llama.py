"""Weights of a known-answer model of the Llama architecture (MHA, GQA, MQA), constructed instead of trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.decoder import config_around, tensors_around
from kvcheck.core.model.family import Family
from kvcheck.core.model.lookups import EXTRA_DIMS, Slots, content_lookup, position_lookup, value_rows
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import NORMED, Registers, Weights
from kvcheck.core.model.rotary import THETA, plan_rotary

FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": ["lm_head", "re:.*proj"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}
"""quantization_config of a model whose cache alone is quantized, with scales in the checkpoint."""


def content_room(head_dim: int, length: int) -> int:
    """Dimensions of a head for digits: the slow ones, less three for constants; values need three as well."""
    return min(len(plan_rotary(head_dim, length).slow_dims), head_dim) - EXTRA_DIMS


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """(name, weights) of every tensor, by Hugging Face's names. All are [out, in]; the embedding is [ids, width].

    Raises UsageError if the head dimension is too small for the alphabet.
    """
    return tensors_around(parameters, partial(_attention, slots_of(parameters)))


def config(parameters: Parameters) -> dict[str, object]:
    quantized = {"quantization_config": FP8_CACHE} if parameters.kv_scale > 1 else {}
    return (
        config_around(parameters)
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": parameters.head_dim,
            "rope_theta": THETA,
            "mlp_bias": False,
        }
        | quantized
    )


def slots_of(parameters: Parameters) -> Slots:
    dim, code = parameters.head_dim, parameters.digits * parameters.base
    rotary = plan_rotary(dim, parameters.length)
    if code > (room := content_room(dim, parameters.length)):
        raise UsageError(
            f"{parameters.digits} digits of base {parameters.base} need {code} dimensions of a head; "
            f"{room} hold content"
        )
    slow = rotary.slow_dims
    return Slots(
        digits=slow[EXTRA_DIMS : EXTRA_DIMS + code],
        constant=slow[0],
        coarse=slow[1],
        fine=slow[2],
        pairs=tuple((pair, pair + dim // 2) for pair in rotary.fast),
        rotary=rotary,
        size=dim,
        values=dim,
        unit=4.0 if dim == 64 else 8.0,
    )


def _attention(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    p = registers.parameters
    query = np.zeros((p.head_dim, registers.width), np.float32)
    key = np.zeros((p.head_dim, registers.width), np.float32)
    content_lookup(registers, slots, layer, query, key)
    position_lookup(registers, slots, layer, query, key)
    values = np.zeros((p.kv_heads, p.head_dim, registers.width), np.float32)
    outputs = np.zeros((registers.width, p.kv_heads, p.group, p.head_dim), np.float32)
    for kv_head in range(p.kv_heads):
        for source, target, dim in value_rows(registers, slots, layer, kv_head):
            values[kv_head, dim, source] = 1 / NORMED
            outputs[target, kv_head, :, dim] = 1 / p.group
    yield "self_attn.q_proj.weight", np.tile(query, (p.kv_heads * p.group, 1))
    yield "self_attn.k_proj.weight", np.tile(key, (p.kv_heads, 1))
    yield "self_attn.v_proj.weight", values.reshape(-1, registers.width)
    yield "self_attn.o_proj.weight", outputs.reshape(registers.width, -1)
    if p.kv_scale > 1:
        for name, scale in zip(("k_scale", "v_scale"), p.scales(layer), strict=True):
            yield f"self_attn.{name}", np.array([scale], np.float32)


LLAMA = Family(tensors=tensors, config=config, slots=slots_of, room=content_room, has_scales=True)
