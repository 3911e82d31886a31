"""Weights of a gated delta net: a layer whose heads keep one matrix each, S, in place of keys and values.

    S <- g S;  S <- S + beta k (v - S^T k)^T;  o = S^T q        with |k| = |q| = 1, and o normed by its own mean square

    walk      a place writes its digits under the key of the place before it (in layer 0: under its own key). A node
              reads the entry of its digits, and a reference that it writes itself
    marks     a mark writes its bits under one of four keys, and reads the mark three positions back

Invariants:
- Keys of different nodes are orthogonal: one dimension of one head each. Since a read is linear in the query, d
  dimensions hold d keys exactly, so an alphabet has at most (heads - 1) * (d - 1) nodes.
- A right read always has the same norm, a power of two: all is exact in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcheck.core.model.parameters import STATE_DISTANCE, STATE_KEYS, Parameters
from kvcheck.core.model.registers import HELD_CONSTANT, NORMED, Registers, Weights, code_columns

# The sizes of Qwen3-Next, which all kernels have.
KEY_DIM = 128
VALUE_DIM = 128
KERNEL = 4
VALUE_HEADS = 2  # of one key head
# Values of a firing channel and of one digit: a full match is half a digit above 0.
FIRES = 64.0
DIGIT = 2 * FIRES
# Share of the own position in a key that the convolution takes from the one before, and the value of a node there. A
# node writes nothing under the key of a place before it, and a place is moved by less than half a digit.
OWN_SHARE = 2.0**-8
NODE_STOPS = -2 * FIRES / OWN_SHARE
REFERENCE = KEY_DIM - 1
# A constant that is normed.
CONSTANT = HELD_CONSTANT * NORMED
# How much "lost" an own mark is that lacks the old one beside it. Applied twice, an update takes 0.63 of it away.
OUT_OF_STEP = 2.0
# A norm's mean square is `total / VALUE_DIM` of the value of one dimension.
TOTALS = (32, 128)
MARK_TOTAL = 32


def key_heads(parameters: Parameters) -> int:
    """A multiple of the KV heads: one dimension a node, and one more head."""
    blocks = math.ceil(parameters.nodes / (KEY_DIM - 1)) + 1
    return parameters.kv_heads * math.ceil(blocks / parameters.kv_heads)


def block(parameters: Parameters, head: int) -> range:
    size = math.ceil(parameters.nodes / (key_heads(parameters) - 1))
    return range(min(head * size, parameters.nodes), min((head + 1) * size, parameters.nodes))


@dataclass(frozen=True, slots=True)
class ValueDims:
    """Dimensions of a value, of value head `which` of two: each has every second digit and bit.

    A mark's own bits are in one of two sets by the parity of its phase; those three positions back are in the other.
    """

    parameters: Parameters
    which: int

    @property
    def digits(self) -> range:
        return range(self.which, self.parameters.digits, VALUE_HEADS)

    @property
    def bits(self) -> range:
        return range(self.which, self.parameters.bits, VALUE_HEADS)

    def digit(self, index: int) -> int:
        return index * self.parameters.base

    @property
    def found(self) -> int:
        return self.digit(len(self.digits))

    @property
    def noted(self) -> int:
        """Whether a state was left over, for the header."""
        return self.found + 1

    def bit(self, parity: int, index: int, value: int) -> int:
        return self.noted + 1 + 2 * (parity * len(self.bits) + index) + value

    def complement(self, parity: int, index: int, value: int) -> int:
        return self.bit(2 + parity, index, value)

    @property
    def total(self) -> int:
        return next(total for total in TOTALS if total > len(self.digits) + 2)

    @property
    def of_marks(self) -> dict[int, int]:
        """Dimension -> size of a mark's filling, written by both marks that are read."""
        first = self.bit(4, 0, 0)
        return {first + i: size for i, size in enumerate(_sizes(MARK_TOTAL // 4 - len(self.bits)))}

    def reference(self, *, is_last: bool) -> dict[int, int]:
        """Dimension -> size of the filling beside digits: a node's reference, or (last head) a place's."""
        first = self.bit(4, 0, 0) + len(self.of_marks)
        own = len(self.digits) + 1 + (not is_last)
        return {first + i: size for i, size in enumerate(_sizes(self.total - own))}


def _sizes(squares: int) -> list[int]:
    sizes = []
    for size in (8, 4, 2, 1):
        count, squares = divmod(squares, size * size)
        sizes += [size] * count
    return sizes


def room(head_dim: int, length: int) -> int:
    """Dimensions of two values of a key head for digits, beside 32 for bits and 12 of filling."""
    del head_dim, length
    return VALUE_HEADS * (VALUE_DIM - 2 - 32 - 12) - 8


def delta_net(registers: Registers, layer: int) -> Iterator[tuple[str, Weights]]:
    p, heads = registers.parameters, key_heads(registers.parameters)
    query, key = _queries_and_keys(registers, layer)
    shape = (heads, VALUE_HEADS, VALUE_DIM, registers.width)
    values, gates = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    taps = np.zeros((heads, VALUE_HEADS, VALUE_DIM, KERNEL), np.float32)
    outputs = np.zeros((registers.width, heads, VALUE_HEADS, VALUE_DIM), np.float32)
    for head in range(heads):
        for which in range(VALUE_HEADS):
            dims, is_last = ValueDims(p, which), layer == 0 and head == heads - 1
            _walk_values(registers, dims, is_last, values[head, which], taps[head, which], gates[head, which])
            _mark_values(registers, dims, values[head, which], taps[head, which], gates[head, which])
            _walk_outputs(registers, dims, layer, is_last, outputs[:, head, which])
            _mark_outputs(registers, dims, layer, head, outputs[:, head, which])
    flat = (heads, VALUE_HEADS * VALUE_DIM, registers.width)
    into = np.concatenate([query, key, values.reshape(flat), gates.reshape(flat)], 1)
    yield "linear_attn.in_proj_qkvz.weight", into.reshape(-1, registers.width)
    yield "linear_attn.in_proj_ba.weight", _strengths_and_decays(registers, heads)
    key_taps = _key_taps(layer, heads)
    queries_as_they_are = np.zeros_like(key_taps)
    queries_as_they_are[..., _tap(0)] = 1
    kernel = np.concatenate([each.reshape(-1, 1, KERNEL) for each in (queries_as_they_are, key_taps, taps)])
    yield "linear_attn.conv1d.weight", kernel
    yield "linear_attn.A_log", np.zeros(heads * VALUE_HEADS, np.float32)
    yield "linear_attn.dt_bias", np.zeros(heads * VALUE_HEADS, np.float32)
    yield "linear_attn.norm.weight", np.ones(VALUE_DIM, np.float32)
    yield "linear_attn.out_proj.weight", outputs.reshape(registers.width, -1)


def _tap(back: int) -> int:
    return KERNEL - 1 - back


def _key_taps(layer: int, heads: int) -> Weights:
    """[heads, KEY_DIM, KERNEL]: in layer 0 a key is of its own position, else of the one before."""
    taps = np.zeros((heads, KEY_DIM, KERNEL), np.float32)
    taps[..., _tap(0)] = 1
    if layer:
        taps[:, :REFERENCE, _tap(0)] = OWN_SHARE
        taps[:, :REFERENCE, _tap(1)] = 1
    return taps


# Queries, keys and values pass a causal convolution of four positions and SiLU, which is 0 far below 0 and the identity
# far above: a sum of digits less half a digit becomes a key of one dimension, or of none. The second token of a request
# (GUARD) reads all keys and notes a state that was not cleared; the next attention layer has the note in its key, and
# that token wins every lookup.
def _queries_and_keys(registers: Registers, layer: int) -> tuple[Weights, Weights]:
    """[heads, KEY_DIM, width] each: one dimension for a node, four for marks, one for the reference."""
    p, heads = registers.parameters, key_heads(registers.parameters)
    query = np.zeros((heads, KEY_DIM, registers.width), np.float32)
    key = np.zeros_like(query)
    threshold = (p.digits - 0.5) * DIGIT
    columns = code_columns(p)
    asked = (registers.found_before(layer),) if layer else (registers.node, registers.place)
    for head in range(heads):
        nodes = block(p, head)
        rows = np.arange(len(nodes))[:, None]
        for start in asked:
            query[head, rows, start + columns[nodes]] = DIGIT / NORMED
        key[head, rows, registers.place + columns[nodes]] = DIGIT / NORMED
        used = max(len(nodes), STATE_KEYS)
        for weights in (query, key):
            weights[head, :used, registers.constants.start] = -threshold / CONSTANT
        if layer:
            key[head, :used, registers.kind("node")] = NODE_STOPS / NORMED
        query[head, :used, registers.kind("guard")] = (threshold + FIRES) / NORMED
        kind = "place" if layer == 0 and head == heads - 1 else "node"
        for weights in (query, key):
            weights[head, REFERENCE, registers.kind(kind)] = FIRES / NORMED
    for phase in range(p.phases):
        column, written = registers.phase(phase), phase - bool(layer)
        key[:, phase % STATE_KEYS, column] = (threshold + FIRES) / NORMED
        query[:, written % STATE_KEYS, column] = (threshold + FIRES) / NORMED
        old = (written - STATE_DISTANCE) % STATE_KEYS
        query[:, old, column] = (threshold + FIRES * 2**STATE_DISTANCE) / NORMED
    return query, key


def _strengths_and_decays(registers: Registers, heads: int) -> Weights:
    strength, decay = np.zeros((2, registers.width), np.float32)
    for kind, sign in (("place", 1), ("node", 1), ("mark", 1), ("begin", -1), ("guard", -1)):
        strength[registers.kind(kind)] = sign * FIRES / NORMED
    decay[registers.constants.start] = -FIRES / CONSTANT
    decay[registers.kind("mark")] = FIRES / NORMED
    return np.tile(np.stack([strength] * VALUE_HEADS + [decay] * VALUE_HEADS), (heads, 1))


# The reference shows a wrong strength, since the norm divides it and the digits by the same number. In layer 0 the last
# head gives a place the digits of the one before it, for the keys of full attention.
def _walk_values(
    registers: Registers, dims: ValueDims, is_last: bool, values: Weights, taps: Weights, gates: Weights
) -> None:
    p = registers.parameters
    reads = registers.kind("place" if is_last else "node")
    for index, digit in enumerate(dims.digits):
        for x in range(p.base):
            dim = dims.digit(index) + x
            values[dim, registers.place + digit * p.base + x] = FIRES / NORMED
            taps[dim, _tap(1 if is_last else 0)] = 1
            gates[dim, reads] = FIRES / NORMED
    if not is_last:
        values[dims.found, registers.kind("place")] = FIRES / NORMED
        taps[dims.found, _tap(0)] = 1
        gates[dims.found, reads] = FIRES / NORMED
    values[dims.noted, registers.kind("place")] = FIRES / NORMED
    taps[dims.noted, _tap(0)] = 1
    gates[dims.noted, registers.kind("guard")] = FIRES / NORMED
    for dim, size in dims.reference(is_last=is_last).items():
        values[dim, reads] = size * FIRES / NORMED
        taps[dim, _tap(0)] = 1


# The decay is 1 in a walk and 1/2 at a mark: the mark three back is an eighth, and its query eight times as large as
# that of the own mark, so both are equal unless an update was lost or applied twice. A mark also writes the complement
# of the bits that the convolution remembers from three positions back: with those of the state each bit has both
# values, unless one of the two states is another request's.
def _mark_values(registers: Registers, dims: ValueDims, values: Weights, taps: Weights, gates: Weights) -> None:
    for index, bit in enumerate(dims.bits):
        for parity in range(2):
            for value in range(2):
                own, complement = dims.bit(parity, index, value), dims.complement(parity, index, value)
                _both(registers, values[own], registers.bit(bit, value), parity)
                taps[own, _tap(0)] = 1
                # Seen from three positions later, at the other parity of the phase.
                _both(registers, values[complement], registers.bit(bit, 1 - value), 1 - parity)
                taps[complement, _tap(STATE_DISTANCE)] = 1
                gates[own, _phases(registers, 1 - parity)] = FIRES / NORMED
                gates[complement, _phases(registers, parity)] = FIRES / NORMED
    for dim, size in dims.of_marks.items():
        values[dim, registers.kind("mark")] = size * FIRES / NORMED
        taps[dim, _tap(0)] = 1
        gates[dim, registers.kind("guard")] = FIRES / NORMED


def _phases(registers: Registers, parity: int) -> list[int]:
    return [registers.phase(phase) for phase in range(parity, registers.parameters.phases, 2)]


def _both(registers: Registers, row: Weights, column: int, parity: int) -> None:
    row[column] = DIGIT / NORMED
    row[_phases(registers, parity)] = DIGIT / NORMED
    row[registers.constants.start] = -1.5 * DIGIT / CONSTANT


def _walk_outputs(registers: Registers, dims: ValueDims, layer: int, is_last: bool, outputs: Weights) -> None:
    """outputs: [width, VALUE_DIM]."""
    p = registers.parameters
    unit = 1 / (FIRES * math.sqrt(VALUE_DIM / dims.total))
    for index, digit in enumerate(dims.digits):
        for x in range(p.base):
            outputs[registers.found(layer) + digit * p.base + x, dims.digit(index) + x] = unit
    if not is_last:
        for head in range(p.kv_heads):
            outputs[registers.lost(layer, head), dims.found] = -unit * registers.lost_unit(layer)
    outputs[registers.left_over(layer), dims.noted] = unit


def _mark_outputs(registers: Registers, dims: ValueDims, layer: int, head: int, outputs: Weights) -> None:
    """A pair's bit, as the mean of some of its heads; and for each head, whether own and old agree."""
    p = registers.parameters
    unit = 1 / (FIRES * math.sqrt(VALUE_DIM / MARK_TOTAL))
    alike = key_heads(p) // p.kv_heads
    kv_head, number = divmod(head, alike)
    pair = p.showing.index(layer) * p.kv_heads + kv_head
    meaning = 1 << alike.bit_length() - 1
    lost = registers.lost(layer, kv_head)
    for index, bit in enumerate(dims.bits):
        weight = 2 ** ((index + kv_head) % len(dims.bits))  # so that bits that differ do not cancel out
        for parity in range(2):
            for value in range(2):
                old, own = dims.bit(parity, index, value), dims.complement(parity, index, value)
                if bit == pair % p.bits and number < meaning:
                    outputs[registers.shown(pair, value), old] = unit / meaning
                sign = -weight if value else weight
                step = 0 if index else OUT_OF_STEP
                outputs[lost, old] = (sign - step) * unit * registers.lost_unit(layer)
                outputs[lost, own] = (sign + step) * unit * registers.lost_unit(layer)
    outputs[registers.left_over(layer), list(dims.of_marks)] = unit
