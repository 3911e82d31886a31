"""Weights of a known-answer model of the DeepSeek V3.2 architecture: MLA with an indexer (DSA).

Attention is that of deepseek_v3 over the top-k positions of each token. The indexer scores index key s for a query by
the sum over its heads h of relu(q_h . k_s), with equal weights. An index key has digits as bits (1 and -1), four
constants and the rotary pairs.

Invariants:
- Positions picked beside the right one, BEGIN and GUARD do not matter: the walk is as exact as without an indexer.
- Before rotation a key holds 1, -1 or the header's constant: exact in FP8 with a scale a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from kvcheck.core.model.decoder import tensors_around
from kvcheck.core.model.deepseek_v3 import DEEPSEEK_V3, ROPE_DIM, attention, into_latent, out_of_latent, slots
from kvcheck.core.model.deepseek_v3 import config as v3_config
from kvcheck.core.model.deepseek_v3 import room as v3_room
from kvcheck.core.model.lookups import Slots
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import HELD_CONSTANT, NORMED, Registers, Weights

# The sizes of DeepSeek V3.2, the only ones of the engines' kernels. Most of them take multiples of 128 as top-k, all
# take 2048.
INDEX_HEADS = 64
INDEX_DIM = 128
TOP_K = 128
QUERY_LATENT = 256

# Dimensions of an index key: the rotary part first, in halves; then constants, then bits. A key holds nothing in the
# second halves of its pairs: three of them are for the norm alone.
SPREAD_DIMS = (ROPE_DIM // 2, ROPE_DIM // 2 + 1)
SUM_DIM = ROPE_DIM // 2 + 2
CONSTANTS = range(ROPE_DIM, ROPE_DIM + 4)
FIRST_BIT = CONSTANTS.stop
SPREAD = 4096.0

# Scores of one head; a matching digit counts 1.
BASELINE = 2.0  # of a place: the difference of a match and a mismatch, so that half of a full match is below
HEADER = 4.0  # value of BEGIN and GUARD; others hold 1
PEAK = 4.0  # of the right mark above the others
AWAY = 6.0  # PEAK < AWAY - 1, for a mark of half the strength; 2 (AWAY - 1 + PEAK) < HEADER AWAY, for one of twice


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    return tensors_around(parameters, partial(_attention, slots(parameters)))


def config(parameters: Parameters) -> dict[str, object]:
    shared = {name: value for name, value in v3_config(parameters).items() if name != "rope_interleave"}
    return shared | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "q_lora_rank": QUERY_LATENT,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": parameters.top_k,
    }


def room(head_dim: int, length: int) -> int:
    """Dimensions of a head for digits; in an index key, a digit of base b has log2(b) bits."""
    return min(v3_room(head_dim, length), 2 * (INDEX_DIM - FIRST_BIT))


def _attention(slots: Slots, registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    (_, query), *others = attention(slots, registers, layer)
    key, asked = _index(registers, slots, layer)
    columns = np.flatnonzero(query.any(0) | asked.any((0, 1)))
    yield "self_attn.q_a_proj.weight", into_latent(registers, columns, QUERY_LATENT)
    yield "self_attn.q_a_layernorm.weight", np.ones(QUERY_LATENT, np.float32)
    yield "self_attn.q_b_proj.weight", out_of_latent(query, columns, QUERY_LATENT)
    yield from others
    norm = np.full(INDEX_DIM, SPREAD * math.sqrt(len(SPREAD_DIMS) / INDEX_DIM), np.float32)
    norm[[*SPREAD_DIMS, SUM_DIM]] = 0
    weigh = np.zeros((INDEX_HEADS, registers.width), np.float32)
    weigh[:, registers.constants.start] = 1 / (HELD_CONSTANT * NORMED)
    wq_b = out_of_latent(asked, columns, QUERY_LATENT).reshape(-1, QUERY_LATENT)
    for name, weights in (
        ("wq_b.weight", wq_b),
        ("wk.weight", key),
        ("k_norm.weight", norm),
        ("k_norm.bias", np.zeros(INDEX_DIM, np.float32)),
        ("weights_proj.weight", weigh),
    ):
        yield f"self_attn.indexer.{name}", weights


def _index(registers: Registers, slots: Slots, layer: int) -> tuple[Weights, Weights]:
    """Index keys [dims, width] and queries [heads, dims, width]."""
    key = np.zeros((INDEX_DIM, registers.width), np.float32)
    query = np.zeros((INDEX_HEADS, INDEX_DIM, registers.width), np.float32)
    _content(registers, layer, key, query)
    _position(registers, slots, layer, key, query)
    for kind, held in (("place", 1.0), ("mark", 1.0), ("begin", HEADER), ("guard", HEADER)):
        key[CONSTANTS, registers.kind(kind)] = held / NORMED
    # LayerNorm has to divide by a power of two: SPREAD and -SPREAD outweigh the rest, a third dimension makes the mean
    # 0, and the norm's weight is 0 in these three. BEGIN and GUARD score more than twice any match, so they are always
    # read.
    key[SUM_DIM] = -key.sum(0)
    key[SPREAD_DIMS, registers.constants.start] = np.array([SPREAD, -SPREAD]) / (HELD_CONSTANT * NORMED)
    return key, query


def _content(registers: Registers, layer: int, key: Weights, query: Weights) -> None:
    p = registers.parameters
    asked = registers.found_before(layer) if layer else registers.node
    held = registers.found(0) if layer else registers.place
    bits = p.base.bit_length() - 1
    signs = np.array([[1 if x >> bit & 1 else -1 for x in range(p.base)] for bit in range(bits)]) / NORMED
    # Head h looks for digit h % digits. A place scores less for each missing digit, and BASELINE without any, so that a
    # key of zeros or of half the strength ranks behind every place.
    for digit in range(p.digits):
        dims = slice(FIRST_BIT + digit * bits, FIRST_BIT + (digit + 1) * bits)
        columns = np.arange(digit * p.base, (digit + 1) * p.base)
        key[dims, held + columns] = signs
        query[digit :: p.digits, dims, asked + columns] = signs
    for kind in ("node", *(("place",) if layer else ())):
        query[:, CONSTANTS, registers.kind(kind)] = BASELINE * bits / len(CONSTANTS) / NORMED


def _position(registers: Registers, slots: Slots, layer: int, key: Weights, query: Weights) -> None:
    """Marks rank the one at their distance first, and places of layer 0 the one before them."""
    p, rotary = registers.parameters, slots.rotary
    pairs = np.array(rotary.fast)
    for kind in ("place", "mark"):
        key[pairs, registers.kind(kind)] = 1 / NORMED
    # With g(e) the rotary score of displacement e from the distance (1 at 0, at most 1 - gap elsewhere): even heads
    # score max(0, g - (1 - gap / 2)), scaled to PEAK; odd heads score AWAY - g. So the right mark ranks first, and one
    # that is a position off ranks behind nearly all others.
    steep = 2 * PEAK / rotary.gap
    sharp, away = query[0::2], query[1::2]
    for kind, back in (("mark", p.distance_of(layer)), *((("place", 1),) if layer == 0 else ())):
        column = registers.kind(kind)
        angle = back * np.array(rotary.frequencies)
        for dims, turned in ((pairs, np.cos(angle)), (pairs + ROPE_DIM // 2, -np.sin(angle))):
            found = np.array(rotary.weights) * turned / NORMED
            sharp[:, dims, column] = steep * found
            away[:, dims, column] = -found
        sharp[:, CONSTANTS, column] = -steep * (1 - rotary.gap / 2) / len(CONSTANTS) / NORMED
        away[:, CONSTANTS, column] = AWAY / len(CONSTANTS) / NORMED


DEEPSEEK_V32 = replace(DEEPSEEK_V3, tensors=tensors, config=config, room=room, top_k=TOP_K)
