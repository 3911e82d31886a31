"""The residual of a known-answer model: a row of registers, the embedding that fills it, the head that reads it.

Registers hold the token's kind, its digits or bits, and for each layer the values found by its heads.

Invariants:
- All sums of a walk are small integers times a power of two: exact in bf16 and fp16 with any number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.alphabet import BEGIN, GUARD, TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.model.parameters import Parameters, node_digits, shown_pair

Weights = npt.NDArray[np.float32]

# Logits a digit (walk) or a bit (marks) of an answer is worth.
DIGIT_LOGIT = 32.0
# A "lost" logit is worth two digits more than an answer; its weight is to be at most 65,504.
MOST_DIGITS_FP16 = 29
# One register in 64 holds it, so the mean square is its 64th part and the norm divides by an eighth of it. The other
# registers move that by less than 1 part in 8,000: rounded to bf16 or fp16 it is the power of two again.
HELD_CONSTANT = 512.0
CONSTANT_SHARE = 64
# Value after the norm of a register that holds 1, in every token and layer.
NORMED = math.sqrt(CONSTANT_SHARE) / HELD_CONSTANT
NORM_EPS = 1e-6
# Value of "lost" in the register of a state layer. Many heads add up there, and the norm must not change.
STATE_LOST = 1 / 64
KINDS = ("begin", "guard", "place", "node", "mark")


@dataclass(frozen=True, slots=True)
class Registers:
    """Columns of the residual by name. code: columns of a node's digits; digit d of value x is at d * base + x."""

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

    def lost_unit(self, layer: int) -> float:
        return STATE_LOST if self.parameters.kind(layer).is_state else 1.0

    def shown(self, pair: int, value: int) -> int:
        return self.lost(self.parameters.layers, 0) + 2 * pair + value

    def left_over(self, layer: int) -> int:
        """The column that a layer's uncleared state fills."""
        return self.shown(self.parameters.pairs, 0) + layer

    @property
    def last(self) -> int:
        return self.parameters.hopping[-1]

    def found_before(self, layer: int) -> int:
        return self.found(max(each for each in (0, *self.parameters.hopping) if each < layer))

    @property
    def width(self) -> int:
        own = self.left_over(self.parameters.layers if self.parameters.has_state else 0)
        return -(-own * CONSTANT_SHARE // ((CONSTANT_SHARE - 1) * 128)) * 128

    @property
    def constants(self) -> slice:
        return slice(self.width - self.width // CONSTANT_SHARE, self.width)


def embedding(registers: Registers, alphabet: Alphabet) -> Weights:
    """[ids, width]."""
    p = registers.parameters
    table = np.zeros((alphabet.size, registers.width), np.float32)
    table[:, registers.constants] = HELD_CONSTANT
    table[BEGIN, registers.kind("begin")] = 1
    table[GUARD, registers.kind("guard")] = 1
    columns = code_columns(p)
    for kind, first, start in (("place", alphabet.places, registers.place), ("node", alphabet.nodes, registers.node)):
        rows = np.arange(first, first + p.nodes)
        table[rows, registers.kind(kind)] = 1
        table[rows[:, None], start + columns] = 1
        if kind == "node" and not p.kind(0).hops:  # layer 0 cannot find its place, so it holds the result
            table[rows[:, None], registers.found(0) + columns] = 1
    # A lost token is fed back as a node without digits, so that the model stays lost.
    table[[TOO_LITTLE, TOO_MUCH], registers.kind("node")] = 1
    table[alphabet.lost(0, 0) : alphabet.places, registers.kind("node")] = 1
    # In a state layer a node is lost by each value head of two until one takes it back that found something.
    asking = np.flatnonzero(table[:, registers.kind("node")])
    for layer in filter(lambda layer: p.kind(layer).is_state, range(p.layers)):
        first = registers.lost(layer, 0)
        table[asking, first : first + p.kv_heads] = 2 * registers.lost_unit(layer)
    windowed = [registers.lost(layer, head) for layer in p.windowed for head in range(p.kv_heads)]
    for phase in range(p.phases):
        for value in range(1 << p.bits):
            row = table[alphabet.mark(phase, value)]
            row[registers.kind("mark")] = row[registers.phase(phase)] = 1
            row[[registers.bit(i, value >> i & 1) for i in range(p.bits)]] = 1
            row[windowed] = 1  # until the layer finds the mark that it reads, which takes it away
    return table


def code_columns(parameters: Parameters) -> npt.NDArray[np.int64]:
    """[nodes, digits] columns of each node's digits, from the start of a code."""
    digits = np.array([node_digits(parameters, node) for node in range(parameters.nodes)], np.int64)
    return digits + np.arange(parameters.digits) * parameters.base


def head(registers: Registers, alphabet: Alphabet) -> Weights:
    """[ids, width]: the logit of each token. Raises UsageError if fp16 cannot hold the weights."""
    p = registers.parameters
    if p.dtype == "fp16" and p.digits > MOST_DIGITS_FP16:
        raise UsageError(
            f"fp16 holds no weights for more than {MOST_DIGITS_FP16} digits; {p.digits} for {p.kv_heads} KV heads. "
            "Ask for --dtype bf16 or fewer --kv-heads"
        )
    table = np.zeros((alphabet.size, registers.width), np.float32)
    logit = DIGIT_LOGIT / NORMED
    rows = np.arange(alphabet.nodes, alphabet.nodes + p.nodes)
    last = registers.found(registers.last)
    table[rows[:, None], last + code_columns(p)] = logit
    # Answers that hold half a digit (or bit) too little or too much; one that is right is half a digit above both.
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
    # A lost token beats every other one; of two layers that are lost, the first one is named. A windowed layer
    # holds no other one back: values that are too strong take it below zero, which TOO_MUCH names.
    most = (max(p.digits, p.bits + 1) + 2) * logit
    table[TOO_MUCH, [registers.lost(layer, head) for layer in p.windowed for head in range(p.kv_heads)]] = -most
    reading = ((0, *p.hopping), p.showing)
    for layer in range(p.layers):
        named = [(alphabet.lost(layer, head), {head: 1.0}) for head in range(p.kv_heads)]
        if p.kv_heads > 1:
            named.append((alphabet.lost(layer, None), dict.fromkeys(range(p.kv_heads), 1.5 / p.kv_heads)))
        if p.kind(layer).is_state:  # values below 0 count for later layers too, by all heads
            ahead = [(token + alphabet.ahead(0, 0) - alphabet.lost(0, 0), shares) for token, shares in named]
            named += [
                (token, {head: -2 * p.kv_heads * share for head, share in shares.items()}) for token, shares in ahead
            ]
        for token, shares in named:
            for head, share in shares.items():
                table[token, registers.lost(layer, head)] = most * share / registers.lost_unit(layer)
            for before in {max((each for each in layers if each < layer), default=layer) for layers in reading}:
                if before != layer and not p.kind(before).is_windowed:
                    table[token, [registers.lost(before, head) for head in range(p.kv_heads)]] = (
                        -most / registers.lost_unit(before)
                    )
    return table
