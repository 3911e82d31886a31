"""Weights of a known-answer model of the Llama architecture (MHA, GQA, MQA), written instead of trained.

The residual is a row of registers: the token's kind, its digits or bits, for each layer what its heads found, and one
register in 64 that holds a constant. The constants outweigh the rest, so the norm divides every register by the same
number, a power of two. Heads look things up; nothing else computes: the MLP is zero.

    layer 0   a place looks one position back and finds the digits of the place before it; a node finds its own place
    layer l   a place's key is the digits of the place before it, its value its own digits: a node's query makes one hop
    marks     each head of each layer looks `distance` positions back and finds one bit

A lookup has to match in every digit, at full strength: BEGIN answers a query that matches half a digit too little,
GUARD one that matches half a digit too much, and both say "lost". A place's key has a constant part, larger than all
its digits, so that a key of twice the strength wins every lookup instead of none.

Invariants:
- All that a walk multiplies and adds is a small whole number times a power of two: exact in bf16 and fp16 with any
  number of layers. Queries, keys and values have 4 significant bits and are at most 448: exact in FP8 E4M3 too. Only
  what rotates is rounded, in FP8 to within 1 part in 16.
- Every head of every layer is needed for every token of an answer, in its keys and (walk) in its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.model.alphabet import BEGIN, END, GUARD, PAD, TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.live.model.family import Family
from kvcheck.core.live.model.parameters import Parameters, node_digits
from kvcheck.core.live.model.rotary import THETA, Rotary, plan_rotary

Weights = npt.NDArray[np.float32]

# What a key holds for one digit; GUARD's holds twice as much. Queries are the smaller for it: with a cache in FP8 some
# kernels round queries to FP8 E4M3 too, which ends at 448.
KEY = 64.0
# Nats between the key at the distance asked for and the next best one; half of it to BEGIN.
POSITION_NATS = 28.0
# Share of a full match that a place's key has without any digit. Above 1: then a key of twice the strength always wins.
CONSTANT = 1.25
# Logits a digit (walk) or a bit (marks) of an answer is worth.
DIGIT_LOGIT = 32.0
# A "lost" logit is worth two digits more than an answer; its weight is to be at most 65,504.
MOST_DIGITS_FP16 = 29
# One register in 64 holds it, so the mean square is its 64th part and the norm divides by an eighth of it. What the
# other registers hold moves that by less than 1 part in 8,000: rounded to bf16 or fp16 it is the power of two again.
HELD_CONSTANT = 512.0
CONSTANT_SHARE = 64
# What a register that holds 1 is after the norm, in every token and layer.
NORMED = math.sqrt(CONSTANT_SHARE) / HELD_CONSTANT
NORM_EPS = 1e-6
MLP_WIDTH = 128
# Dimensions of a head beside its digits: constants in queries and keys, two bits and "lost" in values. The constants of
# a query are as large as all its digits: they lie where nothing turns.
EXTRA_DIMS = 3
KINDS = ("begin", "guard", "place", "node", "mark")


@dataclass(frozen=True, slots=True)
class Registers:
    """Columns of the residual by name. code: columns of one node's digits; digit d of value x is at d * base + x."""

    parameters: Parameters

    @property
    def code(self) -> int:
        return self.parameters.digits * self.parameters.base

    def kind(self, name: str) -> int:
        return KINDS.index(name)

    def phase(self, phase: int) -> int:
        return len(KINDS) + phase

    def bit(self, bit: int, value: int) -> int:
        return self.phase(self.parameters.phases) + 2 * bit + value

    @property
    def place(self) -> int:
        return self.bit(self.parameters.bits, 0)

    @property
    def node(self) -> int:
        return self.place + self.code

    def found(self, layer: int) -> int:
        return self.node + self.code * (1 + layer)

    def lost(self, layer: int, head: int) -> int:
        return self.found(self.parameters.layers) + layer * self.parameters.kv_heads + head

    def shown(self, pair: int, value: int) -> int:
        return self.lost(self.parameters.layers, 0) + 2 * pair + value

    @property
    def width(self) -> int:
        """Columns in all, a multiple of 128."""
        own = self.shown(self.parameters.pairs, 0)
        return -(-own * CONSTANT_SHARE // ((CONSTANT_SHARE - 1) * 128)) * 128

    @property
    def constants(self) -> slice:
        """The last columns, which hold the constant."""
        return slice(self.width - self.width // CONSTANT_SHARE, self.width)


@dataclass(frozen=True, slots=True)
class Heads:
    """Dimensions of a head. Keys and queries: rotary pairs and slow dimensions; values have dimensions of their own."""

    parameters: Parameters
    rotary: Rotary

    def __post_init__(self) -> None:
        p = self.parameters
        needed, room = p.digits * p.base, content_room(p.head_dim, p.length)
        if needed > room:
            raise UsageError(
                f"{p.digits} digits of base {p.base} need {needed} dimensions of a head; {room} hold content"
            )

    def digit(self, column: int) -> int:
        return self.rotary.slow_dims[EXTRA_DIMS + column]

    @property
    def constant(self) -> int:
        return self.rotary.slow_dims[0]

    @property
    def coarse(self) -> int:
        return self.rotary.slow_dims[1]

    @property
    def fine(self) -> int:
        return self.rotary.slow_dims[2]

    def returned(self, head: int) -> list[int]:
        """Digits that a KV head returns."""
        return list(range(head, self.parameters.digits, self.parameters.kv_heads))

    @property
    def lost_value(self) -> int:
        return self.parameters.head_dim - 1

    def bit_value(self, value: int) -> int:
        return self.parameters.head_dim - 3 + value

    @property
    def position_nats(self) -> float:
        """Score of the key that stands exactly at the distance asked for."""
        return POSITION_NATS / self.rotary.gap

    @property
    def unit(self) -> float:
        """What a query holds for one digit: a power of two, such that a digit is worth 32 nats or more."""
        return 4.0 if self.parameters.head_dim == 64 else 8.0


def content_room(head_dim: int, length: int) -> int:
    """Dimensions of a head that can hold digits: the slow ones, less three for constants; values need three as well."""
    return min(len(plan_rotary(head_dim, length).slow_dims), head_dim) - EXTRA_DIMS


def tensors(parameters: Parameters) -> Iterator[tuple[str, Weights]]:
    """(name, weights) of every tensor, by Hugging Face's names. All are [out, in]; the embedding is [ids, width].

    Raises UsageError where the head dimension is too small for the alphabet.
    """
    if parameters.dtype == "fp16" and parameters.digits > MOST_DIGITS_FP16:
        raise UsageError(
            f"fp16 holds no weights for more than {MOST_DIGITS_FP16} digits; {parameters.digits} for "
            f"{parameters.kv_heads} KV heads. Ask for --dtype bf16 or fewer --kv-heads"
        )
    registers, alphabet = Registers(parameters), Alphabet(parameters)
    heads = Heads(parameters, plan_rotary(parameters.head_dim, parameters.length))
    yield "model.embed_tokens.weight", _embedding(registers, alphabet)
    for layer in range(parameters.layers):
        prefix = f"model.layers.{layer}."
        for name, weights in _attention(registers, heads, layer):
            yield f"{prefix}self_attn.{name}_proj.weight", weights
        for name, shape in (("gate", (MLP_WIDTH, -1)), ("up", (MLP_WIDTH, -1)), ("down", (-1, MLP_WIDTH))):
            yield (
                f"{prefix}mlp.{name}_proj.weight",
                np.zeros([registers.width if n < 0 else n for n in shape], np.float32),
            )
        for name in ("input", "post_attention"):
            yield f"{prefix}{name}_layernorm.weight", np.ones(registers.width, np.float32)
    yield "model.norm.weight", np.ones(registers.width, np.float32)
    yield "lm_head.weight", _head(registers, alphabet)


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


def _embedding(registers: Registers, alphabet: Alphabet) -> Weights:
    p = registers.parameters
    table = np.zeros((alphabet.size, registers.width), np.float32)
    table[:, registers.constants] = HELD_CONSTANT
    table[BEGIN, registers.kind("begin")] = 1
    table[GUARD, registers.kind("guard")] = 1
    columns = _code_columns(p)
    for kind, first, start in (("place", alphabet.places, registers.place), ("node", alphabet.nodes, registers.node)):
        rows = np.arange(first, first + p.nodes)
        table[rows, registers.kind(kind)] = 1
        table[rows[:, None], start + columns] = 1
    # What a lost model says is asked again as a node without digits, so that it stays lost.
    table[[TOO_LITTLE, TOO_MUCH], registers.kind("node")] = 1
    table[alphabet.lost(0, 0) : alphabet.places, registers.kind("node")] = 1
    for phase in range(p.phases):
        for value in range(1 << p.bits):
            row = table[alphabet.mark(phase, value)]
            row[registers.kind("mark")] = row[registers.phase(phase)] = 1
            row[[registers.bit(i, value >> i & 1) for i in range(p.bits)]] = 1
    return table


def _code_columns(parameters: Parameters) -> npt.NDArray[np.int64]:
    """[nodes, digits] columns of each node's digits, from the start of a code."""
    digits = np.array([node_digits(parameters, node) for node in range(parameters.nodes)], np.int64)
    return digits + np.arange(parameters.digits) * parameters.base


def _attention(registers: Registers, heads: Heads, layer: int) -> Iterator[tuple[str, Weights]]:
    p = registers.parameters
    query = np.zeros((p.head_dim, registers.width), np.float32)
    key = np.zeros((p.head_dim, registers.width), np.float32)
    _content_lookup(registers, heads, layer, query, key)
    _position_lookup(registers, heads, layer, query, key)
    values = np.zeros((p.kv_heads, p.head_dim, registers.width), np.float32)
    outputs = np.zeros((registers.width, p.kv_heads, p.group, p.head_dim), np.float32)
    for head in range(p.kv_heads):
        for source, target, dim in _value_rows(registers, heads, layer, head):
            values[head, dim, source] = 1 / NORMED
            outputs[target, head, :, dim] = 1 / p.group
    yield "q", np.tile(query, (p.kv_heads * p.group, 1))
    yield "k", np.tile(key, (p.kv_heads, 1))
    yield "v", values.reshape(-1, registers.width)
    yield "o", outputs.reshape(registers.width, -1)


def _content_lookup(registers: Registers, heads: Heads, layer: int, query: Weights, key: Weights) -> None:
    """A node asks for a place with its digits; BEGIN and GUARD answer where the match is too weak or too strong."""
    p = registers.parameters
    asked = registers.found(layer - 1) if layer else registers.node
    held = registers.found(0) if layer else registers.place
    for column in range(registers.code):
        query[heads.digit(column), asked + column] = heads.unit / NORMED
        key[heads.digit(column), held + column] = KEY / NORMED
        key[heads.digit(column), registers.kind("guard")] = 2 * KEY / NORMED
    query[heads.constant, registers.kind("node")] = four_bits(CONSTANT * p.digits / 2) * heads.unit / NORMED
    for kind in ("place", "begin", "guard"):
        key[heads.constant, registers.kind(kind)] = 2 * KEY / NORMED
    # BEGIN scores half a digit less than a full match, GUARD rises twice as fast and scores as much: each in two parts.
    coarse = four_bits(p.digits)
    query[heads.coarse, registers.kind("node")] = coarse / 2 * heads.unit / NORMED
    query[heads.fine, registers.kind("node")] = heads.unit / NORMED
    for kind, sign, digits in (("begin", 1, p.digits - 0.5), ("guard", -1, p.digits + 0.5)):
        key[heads.coarse, registers.kind(kind)] = sign * 2 * KEY / NORMED
        key[heads.fine, registers.kind(kind)] = sign * (digits - coarse) * KEY / NORMED


def four_bits(value: float) -> float:
    """The nearest number of 4 significant bits, which is what FP8 E4M3 holds."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(16 * mantissa), exponent - 4)


def _position_lookup(registers: Registers, heads: Heads, layer: int, query: Weights, key: Weights) -> None:
    """Places ask for the key one position back, in layer 0; marks for the one `distance` back, in every layer."""
    p = registers.parameters
    half = p.head_dim // 2
    asking = [("mark", p.distance), *([("place", 1)] if layer == 0 else [])]
    scale = math.sqrt(p.head_dim) / (KEY * NORMED)
    for kind, back in asking:
        column = registers.kind(kind)
        for pair, weight, frequency in zip(
            heads.rotary.fast, heads.rotary.weights, heads.rotary.frequencies, strict=True
        ):
            peak = weight * heads.position_nats * scale
            query[pair, column] = peak * math.cos(back * frequency)
            query[pair + half, column] = -peak * math.sin(back * frequency)
        # BEGIN's score, once more in two parts.
        begin = (heads.position_nats - POSITION_NATS / 2) * scale * NORMED
        most = four_bits(begin / 2)
        query[heads.coarse, column] = most / NORMED
        query[heads.fine, column] = four_bits((begin - 2 * most) / (p.digits - 0.5 - four_bits(p.digits))) / NORMED
    for kind in ("place", "mark"):
        for pair in heads.rotary.fast:
            key[pair, registers.kind(kind)] = KEY / NORMED
    if layer:  # a place asks nothing here; it reads BEGIN, whatever else the cache holds
        query[heads.coarse, registers.kind("place")] = four_bits(POSITION_NATS / 2 * scale * NORMED) / NORMED


def _value_rows(registers: Registers, heads: Heads, layer: int, head: int) -> Iterator[tuple[int, int, int]]:
    """(column read, column written, value dimension) of all that a head returns."""
    p = registers.parameters
    pair = layer * p.kv_heads + head
    for index, digit in enumerate(heads.returned(head)):
        for x in range(p.base):
            column = digit * p.base + x
            yield registers.place + column, registers.found(layer) + column, index * p.base + x
    for kind in ("begin", "guard"):
        yield registers.kind(kind), registers.lost(layer, head), heads.lost_value
    for value in range(2):
        yield registers.bit(pair % p.bits, value), registers.shown(pair, value), heads.bit_value(value)


def _head(registers: Registers, alphabet: Alphabet) -> Weights:
    p = registers.parameters
    table = np.zeros((alphabet.size, registers.width), np.float32)
    logit = DIGIT_LOGIT / NORMED
    rows = np.arange(alphabet.nodes, alphabet.nodes + p.nodes)
    table[rows[:, None], registers.found(p.layers - 1) + _code_columns(p)] = logit
    # Answers that hold half a digit (or bit) too little or too much; one that is right is half a digit above both.
    last = registers.found(p.layers - 1)
    table[TOO_LITTLE, registers.kind("node")] = (p.digits - 0.5) * logit
    table[TOO_LITTLE, registers.kind("mark")] = (p.bits + 0.5) * logit
    table[TOO_MUCH, last : last + registers.code] = 2 * logit
    table[TOO_MUCH, registers.kind("node")] = -(p.digits + 0.5) * logit
    for phase in range(p.phases):
        before = (phase - 1) % p.phases
        for value in range(1 << p.bits):
            row = table[alphabet.mark(phase, value)]
            row[registers.phase(before)] = logit
            for i in range(p.bits):
                row[registers.shown(shown_pair(p, before, i), value >> i & 1)] = logit
    # A lost token beats every other one; of two layers that are lost, the first one is named.
    most = (max(p.digits, p.bits + 1) + 2) * logit
    for layer in range(p.layers):
        named = [(alphabet.lost(layer, head), {head: 1.0}) for head in range(p.kv_heads)]
        if p.kv_heads > 1:
            named.append((alphabet.lost(layer, None), dict.fromkeys(range(p.kv_heads), 1.5 / p.kv_heads)))
        for token, shares in named:
            for head, share in shares.items():
                table[token, registers.lost(layer, head)] = most * share
            if layer:
                table[token, [registers.lost(layer - 1, head) for head in range(p.kv_heads)]] = -most
    return table


def shown_pair(parameters: Parameters, phase: int, bit: int) -> int:
    """The pair whose bit is shown after a mark of that phase; a short last group borrows from the one before."""
    pair = phase * parameters.bits + bit
    return pair if pair < parameters.pairs else pair - parameters.bits


LLAMA = Family(tensors=tensors, config=config, room=content_room)
