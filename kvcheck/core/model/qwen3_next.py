"""Weights of a known-answer model of the Qwen3-Next architecture: of four layers three are gated delta nets.

Attention is as in Llama, with an open output gate. A quarter of a head rotates; content lies in the rest.

Invariants:
- Norms are stored less 1, except the gated one of a delta net.
- Every MLP is a mixture of experts that are zero, the only kind that all engines read.
- fp16 is refused: a state layer's lookups need weights above 65,504.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model import delta_net
from kvcheck.core.model.decoder import MLP_WIDTH, config_around, tensors_around
from kvcheck.core.model.family import Family
from kvcheck.core.model.lookups import EXTRA_DIMS, KEY, Slots, content_lookup, position_lookup, value_rows
from kvcheck.core.model.parameters import KINDS_OF, Parameters
from kvcheck.core.model.registers import NORMED, Registers, Weights
from kvcheck.core.model.rotary import plan_rotary

HEAD_DIM = 256
ROPE_DIM = 64
THETA = 1e4
EXPERTS = 8
CONSTANT_DIMS = 4
# Their value before the norm, which divides by an eighth of it; it outweighs the largest key by 2^13 to 1, squared.
HELD = 32768.0
NORM_GAIN = HELD / 8
MOST_NODES = 16384  # 130 heads of 128 x 128 in a state


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """As Llama's; a convolution is [channels, 1, positions]. Raises UsageError for sizes without room."""
    return tensors_around(parameters, partial(_layer, _slots(parameters)), norm_weight=0.0)


def config(parameters: Parameters) -> dict[str, object]:
    shared = config_around(parameters)
    key_heads = delta_net.key_heads(parameters)
    kinds = ["linear_attention" if parameters.kind(i).is_state else "full_attention" for i in range(parameters.layers)]
    return shared | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": HEAD_DIM,
        "rope_theta": THETA,
        "partial_rotary_factor": ROPE_DIM / HEAD_DIM,
        "attn_output_gate": True,
        "layer_types": kinds,
        "full_attention_interval": len(KINDS_OF[parameters.family]),
        "linear_conv_kernel_dim": delta_net.KERNEL,
        "linear_key_head_dim": delta_net.KEY_DIM,
        "linear_value_head_dim": delta_net.VALUE_DIM,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * delta_net.VALUE_HEADS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": MLP_WIDTH,
        "shared_expert_intermediate_size": MLP_WIDTH,
        "norm_topk_prob": True,
    }


def room(head_dim: int, length: int) -> int:
    """Dimensions for digits: of a value in a state, which has fewer than a key."""
    return min(delta_net.room(head_dim, length), HEAD_DIM - ROPE_DIM - CONSTANT_DIMS - EXTRA_DIMS)


def _slots(parameters: Parameters) -> Slots:
    code, has_room = parameters.digits * parameters.base, room(HEAD_DIM, parameters.length)
    if parameters.dtype == "fp16":
        raise UsageError("fp16 cannot hold the keys of a state of qwen3-next; ask for --dtype bf16")
    if parameters.layers < len(KINDS_OF[parameters.family]):
        raise UsageError(
            f"qwen3-next has attention in every {len(KINDS_OF[parameters.family])}th layer; got {parameters.layers} "
            "layers: ask for more --layers"
        )
    if parameters.nodes > MOST_NODES:
        raise UsageError(
            f"a state of qwen3-next holds {MOST_NODES} nodes at most, one dimension of a head each; got "
            f"{parameters.nodes}: ask for fewer --nodes"
        )
    if code > has_room:
        raise UsageError(
            f"{parameters.digits} digits of base {parameters.base} need {code} dimensions; {has_room} hold content"
        )
    rotary = plan_rotary(ROPE_DIM, parameters.length, THETA)
    first = ROPE_DIM + EXTRA_DIMS
    return Slots(
        digits=tuple(range(first, first + code)),
        constant=ROPE_DIM,
        coarse=ROPE_DIM + 1,
        fine=ROPE_DIM + 2,
        pairs=tuple((pair, pair + ROPE_DIM // 2) for pair in rotary.fast),
        rotary=rotary,
        size=HEAD_DIM,
        values=HEAD_DIM,
        unit=8.0,
    )


def _layer(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    if registers.parameters.kind(layer).is_state:
        yield from delta_net.delta_net(registers, layer)
    else:
        yield from _attention(slots, registers, layer)
    yield from _experts(registers.width)


def _attention(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    p = registers.parameters
    query = np.zeros((HEAD_DIM, registers.width), np.float32)
    key = np.zeros((HEAD_DIM, registers.width), np.float32)
    content_lookup(registers, slots, layer, query, key)
    position_lookup(registers, slots, layer, query, key)
    for below in range(layer - 1, -1, -1):
        if not p.kind(below).is_state:
            break
        # GUARD alone has something in this register, if a state was not cleared: that makes its key the strongest.
        key[slots.constant, registers.left_over(below)] = 2 * KEY / NORMED
    values = np.zeros((p.kv_heads, HEAD_DIM, registers.width), np.float32)
    outputs = np.zeros((registers.width, p.kv_heads, p.group, HEAD_DIM), np.float32)
    for kv_head in range(p.kv_heads):
        for source, target, dim in value_rows(registers, slots, layer, kv_head):
            values[kv_head, dim, source] = 1 / NORMED
            outputs[target, kv_head, :, dim] = 1 / p.group
    # Norms of queries and keys: a constant outweighs the rest, so the norm always divides by the same number; its own
    # weight removes the constant.
    gain = np.full(HEAD_DIM, NORM_GAIN, np.float32)
    gain[-CONSTANT_DIMS:] = -1  # nothing is left of them
    for weights in (query, key):
        weights[-CONSTANT_DIMS:, registers.constants.start] = HELD / delta_net.CONSTANT
    gate = np.zeros((HEAD_DIM, registers.width), np.float32)
    gate[:, registers.constants.start] = delta_net.FIRES / delta_net.CONSTANT
    yield "self_attn.q_proj.weight", np.tile(np.concatenate([query, gate]), (p.kv_heads * p.group, 1))
    yield "self_attn.k_proj.weight", np.tile(key, (p.kv_heads, 1))
    yield "self_attn.v_proj.weight", values.reshape(-1, registers.width)
    yield "self_attn.o_proj.weight", outputs.reshape(registers.width, -1)
    yield "self_attn.q_norm.weight", gain
    yield "self_attn.k_norm.weight", gain.copy()


def _experts(width: int) -> Iterator[tuple[str, Weights]]:
    yield "mlp.gate.weight", np.zeros((EXPERTS, width), np.float32)
    yield "mlp.shared_expert_gate.weight", np.zeros((1, width), np.float32)
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_expert"):
        for name, shape in (("gate", (MLP_WIDTH, width)), ("up", (MLP_WIDTH, width)), ("down", (width, MLP_WIDTH))):
            yield f"mlp.{expert}.{name}_proj.weight", np.zeros(shape, np.float32)


QWEN3_NEXT = Family(
    tensors=tensors,
    config=config,
    slots=_slots,
    room=room,
    head_dim=HEAD_DIM,
    fixed=frozenset({"head_dim"}),
    most_nodes=MOST_NODES,
)
