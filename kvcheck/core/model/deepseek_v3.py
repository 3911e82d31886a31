"""Weights of a known-answer model of the DeepSeek V3 architecture: MLA, with one latent of a token for all heads.

A wrong latent shows by its content, a wrong rotary position by the position test.

Invariants:
- All factors and sums of a walk are small integers times a power of two. Absorbed MLA rounds the query in the latent's
  space: to 1 part in 256 of a score, less than a quarter of a digit.
- fp16 is refused: a query in the latent's space exceeds 65,504.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.decoder import config_around, tensors_around
from kvcheck.core.model.family import Family
from kvcheck.core.model.lookups import EXTRA_DIMS, Slots, content_lookup, position_lookup, value_rows
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import CONSTANT_SHARE, NORMED, Registers, Weights
from kvcheck.core.model.rotary import plan_rotary

# The sizes of DeepSeek V2 and V3, which are the only ones that the engines' kernels have.
HEAD_DIM = 128  # of the part of a key that does not turn, and of a value
ROPE_DIM = 64
LATENT = 512
THETA = 1e4
# BEGIN scores 2.25 digits less a half for each digit of a query. In the latent's space that is one number, and bf16
# holds halves up to 128.
MOST_DIGITS = 56


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """As Llama's. Raises UsageError if a head or the latent is too small for the alphabet."""
    return tensors_around(parameters, partial(attention, slots(parameters)))


def config(parameters: Parameters) -> dict[str, object]:
    shared = config_around(parameters)
    return shared | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": HEAD_DIM,
        "rope_theta": THETA,
        "rope_interleave": True,
        # YaRN by a factor of 1 changes nothing; SGLang's CPU path takes no model of this architecture without it.
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": parameters.length,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "first_k_dense_replace": parameters.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": shared["intermediate_size"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }


def room(head_dim: int, length: int) -> int:
    """Dimensions of a head for digits, at any length: none of them rotates."""
    del length
    return head_dim - EXTRA_DIMS


def slots(parameters: Parameters) -> Slots:
    """Constants and content in the part without rotation; behind it the rotary part, in pairs of neighbours."""
    code = parameters.digits * parameters.base
    if parameters.dtype == "fp16":
        raise UsageError("fp16 cannot hold a query of deepseek-v3 in the latent's space; ask for --dtype bf16")
    if code > room(HEAD_DIM, parameters.length):
        raise UsageError(
            f"{parameters.digits} digits of base {parameters.base} need {code} dimensions of a head; "
            f"{room(HEAD_DIM, parameters.length)} hold content"
        )
    if parameters.digits > MOST_DIGITS:
        raise UsageError(
            f"a query in the latent's space holds at most {MOST_DIGITS} digits; {parameters.digits} for "
            f"{parameters.kv_heads} KV heads: ask for fewer --kv-heads"
        )
    rotary = plan_rotary(ROPE_DIM, parameters.length, THETA)
    return Slots(
        digits=tuple(range(EXTRA_DIMS, EXTRA_DIMS + code)),
        constant=0,
        coarse=1,
        fine=2,
        pairs=tuple((HEAD_DIM + 2 * pair, HEAD_DIM + 2 * pair + 1) for pair in rotary.fast),
        rotary=rotary,
        size=HEAD_DIM + ROPE_DIM,
        values=HEAD_DIM,
        unit=8.0,
    )


def attention(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    p = registers.parameters
    query = np.zeros((slots.size, registers.width), np.float32)
    key = np.zeros((slots.size, registers.width), np.float32)
    content_lookup(registers, slots, layer, query, key)
    position_lookup(registers, slots, layer, query, key)
    values = np.zeros((p.kv_heads, HEAD_DIM, registers.width), np.float32)
    outputs = np.zeros((registers.width, p.kv_heads, HEAD_DIM), np.float32)
    for kv_head in range(p.kv_heads):
        for source, target, dim in value_rows(registers, slots, layer, kv_head):
            values[kv_head, dim, source] = 1 / NORMED
            outputs[target, kv_head, dim] = 1
    columns = np.flatnonzero(key[:HEAD_DIM].any(0) | values.any((0, 1)))
    out_of = np.zeros((p.kv_heads, 2 * HEAD_DIM, registers.width), np.float32)
    out_of[:, :HEAD_DIM], out_of[:, HEAD_DIM:] = key[:HEAD_DIM], values
    yield "self_attn.q_proj.weight", np.tile(query, (p.kv_heads, 1))
    into = np.concatenate([into_latent(registers, columns, LATENT), key[HEAD_DIM:]])
    yield "self_attn.kv_a_proj_with_mqa.weight", into
    yield "self_attn.kv_a_layernorm.weight", np.ones(LATENT, np.float32)
    yield "self_attn.kv_b_proj.weight", out_of_latent(out_of, columns, LATENT).reshape(-1, LATENT)
    yield "self_attn.o_proj.weight", outputs.reshape(registers.width, -1)


# The latent holds the registers of keys and values unchanged, and a constant in one dimension of 64, so that its own
# norm divides by a power of two as the residual's does. Each head makes its keys and values from it: content in the
# part of a key without rotation, position in the rotary part, which all heads share.
def into_latent(registers: Registers, columns: npt.NDArray[np.int64], size: int) -> Weights:
    """[size, width]: copies those registers into a latent, with the constant of its norm."""
    content = size - size // CONSTANT_SHARE
    if len(columns) > content:
        raise UsageError(f"the latent holds {content} registers; {len(columns)} are needed: ask for fewer --kv-heads")
    into = np.zeros((size, registers.width), np.float32)
    into[np.arange(len(columns)), columns] = 1 / NORMED
    # So the latent's constant is as large as the residual's was before its norm, and a register that held 1 holds 1.
    into[content:, registers.constants.start] = 1 / NORMED
    return into


def out_of_latent(weights: Weights, columns: npt.NDArray[np.int64], size: int) -> Weights:
    """[..., size]: weights over registers, [..., width], as weights over the latent of those columns."""
    out = np.zeros((*weights.shape[:-1], size), np.float32)
    out[..., : len(columns)] = weights[..., columns]
    return out


DEEPSEEK_V3 = Family(
    tensors=tensors,
    config=config,
    slots=slots,
    room=room,
    group=1,
    head_dim=HEAD_DIM,
    fixed=frozenset({"group", "head_dim"}),
)
