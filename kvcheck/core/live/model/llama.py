"""Weights of a known-answer model of the Llama architecture (MHA, GQA, MQA), written instead of trained.

Heads look things up; nothing else computes: the MLP is zero. Content lies in rotary pairs that hardly turn.

Invariants:
- All that a walk multiplies and adds is a small whole number times a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.model.alphabet import BEGIN, END, PAD, Alphabet
from kvcheck.core.live.model.family import Family
from kvcheck.core.live.model.lookups import EXTRA_DIMS, Slots, content_lookup, position_lookup, value_rows
from kvcheck.core.live.model.parameters import Parameters
from kvcheck.core.live.model.registers import NORM_EPS, NORMED, Registers, Weights, embedding, head
from kvcheck.core.live.model.rotary import THETA, plan_rotary

MLP_WIDTH = 128
Attention = Callable[[Registers, Slots, int], Iterator[tuple[str, Weights]]]


def content_room(head_dim: int, length: int) -> int:
    """Dimensions of a head that can hold digits: the slow ones, less three for constants; values need three as well."""
    return min(len(plan_rotary(head_dim, length).slow_dims), head_dim) - EXTRA_DIMS


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """(name, weights) of every tensor, by Hugging Face's names. All are [out, in]; the embedding is [ids, width].

    Raises UsageError where the head dimension is too small for the alphabet.
    """
    return tensors_around(parameters, _slots(parameters), _attention)


def tensors_around(parameters: Parameters, slots: Slots, attention: Attention) -> Iterator[tuple[str, Weights]]:
    """(name, weights) of every tensor of a dense decoder. attention: (name, weights) of one layer's, by Hugging Face's
    names below `self_attn`; the MLP is zero. Raises UsageError where fp16 cannot hold the head."""
    registers, alphabet = Registers(parameters), Alphabet(parameters)
    last = head(registers, alphabet)
    yield "model.embed_tokens.weight", embedding(registers, alphabet)
    for layer in range(parameters.layers):
        prefix = f"model.layers.{layer}."
        for name, weights in attention(registers, slots, layer):
            yield f"{prefix}self_attn.{name}.weight", weights
        yield from _empty_mlp(prefix, registers.width)
    yield "model.norm.weight", np.ones(registers.width, np.float32)
    yield "lm_head.weight", last


def _empty_mlp(prefix: str, width: int) -> Iterator[tuple[str, Weights]]:
    """A layer's MLP, which is zero, and its two norms."""
    for name, shape in (("gate", (MLP_WIDTH, width)), ("up", (MLP_WIDTH, width)), ("down", (width, MLP_WIDTH))):
        yield f"{prefix}mlp.{name}_proj.weight", np.zeros(shape, np.float32)
    for name in ("input", "post_attention"):
        yield f"{prefix}{name}_layernorm.weight", np.ones(width, np.float32)


def config(parameters: Parameters) -> dict[str, object]:
    """config.json of the model, as transformers, SGLang and vLLM read it."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8-kv": "bfloat16"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": Registers(parameters).width,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": parameters.layers,
        "num_attention_heads": parameters.kv_heads * parameters.group,
        "num_key_value_heads": parameters.kv_heads,
        "head_dim": parameters.head_dim,
        "vocab_size": Alphabet(parameters).size,
        "max_position_embeddings": parameters.length,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": THETA,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": names[parameters.dtype],
    }


def _slots(parameters: Parameters) -> Slots:
    """Content in the slow dimensions. Raises UsageError where they are too few."""
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


def _attention(registers: Registers, slots: Slots, layer: int) -> Iterator[tuple[str, Weights]]:
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
    yield "q_proj", np.tile(query, (p.kv_heads * p.group, 1))
    yield "k_proj", np.tile(key, (p.kv_heads, 1))
    yield "v_proj", values.reshape(-1, registers.width)
    yield "o_proj", outputs.reshape(registers.width, -1)


LLAMA = Family(tensors=tensors, config=config, room=content_room)
