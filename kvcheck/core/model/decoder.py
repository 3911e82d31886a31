"""The decoder around attention, and its config.json, common to all architectures. Every MLP is zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvcheck.core.model.alphabet import BEGIN, END, PAD, Alphabet
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import NORM_EPS, Registers, Weights, embedding, head

MLP_WIDTH = 128
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8-kv": "bfloat16"}
Attention = Callable[[Registers, int], Iterator[tuple[str, Weights]]]
"""(name, weights) of one layer's tensors, by Hugging Face's names below the layer."""


def tensors_around(
    parameters: Parameters, attention: Attention, *, norm_weight: float = 1.0
) -> Iterator[tuple[str, Weights]]:
    """(name, weights) of every tensor of a decoder. Raises UsageError if fp16 cannot hold the head.

    attention: of one layer, without norms and dense MLP. norm_weight: the stored weight of a norm that multiplies by 1.
    """
    registers, alphabet = Registers(parameters), Alphabet(parameters)
    last = head(registers, alphabet)
    yield "model.embed_tokens.weight", embedding(registers, alphabet)
    for layer in range(parameters.layers):
        prefix, has_mlp = f"model.layers.{layer}.", False
        for name, weights in attention(registers, layer):
            has_mlp = has_mlp or name.startswith("mlp.")
            yield prefix + name, weights
        if not has_mlp:
            yield from _empty_mlp(prefix, registers.width)
        for name in ("input", "post_attention"):
            yield f"{prefix}{name}_layernorm.weight", np.full(registers.width, norm_weight, np.float32)
    yield "model.norm.weight", np.full(registers.width, norm_weight, np.float32)
    yield "lm_head.weight", last


def _empty_mlp(prefix: str, width: int) -> Iterator[tuple[str, Weights]]:
    for name, shape in (("gate", (MLP_WIDTH, width)), ("up", (MLP_WIDTH, width)), ("down", (width, MLP_WIDTH))):
        yield f"{prefix}mlp.{name}_proj.weight", np.zeros(shape, np.float32)


def config_around(parameters: Parameters) -> dict[str, object]:
    return {
        "hidden_size": Registers(parameters).width,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": parameters.layers,
        "num_attention_heads": parameters.kv_heads * parameters.group,
        "num_key_value_heads": parameters.kv_heads,
        "vocab_size": Alphabet(parameters).size,
        "max_position_embeddings": parameters.length,
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": TORCH_NAMES[parameters.dtype],
    }
