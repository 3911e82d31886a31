"""Lookups of a known-answer model's heads: queries, keys and values.

    layer 0   a place looks one position back and finds the digits of the place before it; a node finds its own place
    layer l   a place's key is the digits of the place before it, its value its own digits: a node's query makes one hop
    marks     each head of each layer looks `distance` positions back and finds one bit

Invariants:
- Queries, keys and values have 4 significant bits and are at most 448: exact in FP8 E4M3. Only rotated parts are
  rounded, in FP8 to within 1 part in 16.
- Every head of every layer is needed for every token of an answer, in its keys and (walk) in its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvcheck.core.model.parameters import Parameters
from kvcheck.core.model.registers import NORMED, Registers, Weights
from kvcheck.core.model.rotary import Rotary

# Value of a key for one digit; twice as much in GUARD's. It keeps queries small: with a cache in FP8 some kernels round
# queries to FP8 E4M3 too, which ends at 448.
KEY = 64.0
# Nats between the key at the distance and the next best one; half of it to BEGIN.
POSITION_NATS = 28.0
# Share of a full match that a place's key has without any digit. Above 1: then a key of twice the strength always wins.
CONSTANT = 1.25
# Dimensions of a head beside its digits: constants in queries and keys, two bits and "lost" in values. The constants of
# a query are as large as all its digits: they are in dimensions without rotation.
EXTRA_DIMS = 3


@dataclass(frozen=True, slots=True)
class Slots:
    """Dimensions of a head. digits: of each column of a code. constant, coarse, fine: of constants in queries and keys.
    pairs: of each rotary pair in `rotary.fast`. size: of a query. values: of a value.

    unit: a query's entry for one digit: a power of two, such that a digit is worth 32 nats or more.
    """

    digits: tuple[int, ...]
    constant: int
    coarse: int
    fine: int
    pairs: tuple[tuple[int, int], ...]
    rotary: Rotary
    size: int
    values: int
    unit: float

    @property
    def lost_value(self) -> int:
        return self.values - 1

    def bit_value(self, value: int) -> int:
        return self.values - 3 + value

    @property
    def position_nats(self) -> float:
        return POSITION_NATS / self.rotary.gap


def returned(parameters: Parameters, head: int) -> range:
    return range(head, parameters.digits, parameters.kv_heads)


def content_lookup(registers: Registers, slots: Slots, layer: int, query: Weights, key: Weights) -> None:
    p = registers.parameters
    asked = registers.found_before(layer) if layer else registers.node
    held = registers.found(0) if layer else registers.place
    for column in range(registers.code):
        query[slots.digits[column], asked + column] = slots.unit / NORMED
        key[slots.digits[column], held + column] = KEY / NORMED
        key[slots.digits[column], registers.kind("guard")] = 2 * KEY / NORMED
    query[slots.constant, registers.kind("node")] = four_bits(CONSTANT * p.digits / 2) * slots.unit / NORMED
    for kind in ("place", "begin", "guard"):
        key[slots.constant, registers.kind(kind)] = 2 * KEY / NORMED
    # A lookup has to match in every digit, at full strength: BEGIN answers a query that matches half a digit too
    # little, GUARD one that matches half a digit too much; both return "lost". The constant part of a place's key is
    # larger than all its digits, so a key of twice the strength wins every lookup instead of none.
    # BEGIN scores half a digit less than a full match, GUARD rises twice as fast and scores as much: each in two parts.
    coarse = four_bits(p.digits)
    query[slots.coarse, registers.kind("node")] = coarse / 2 * slots.unit / NORMED
    query[slots.fine, registers.kind("node")] = slots.unit / NORMED
    for kind, sign, digits in (("begin", 1, p.digits - 0.5), ("guard", -1, p.digits + 0.5)):
        key[slots.coarse, registers.kind(kind)] = sign * 2 * KEY / NORMED
        key[slots.fine, registers.kind(kind)] = sign * (digits - coarse) * KEY / NORMED


def four_bits(value: float) -> float:
    return rounded(value, 4)


def rounded(value: float, bits: int) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def position_lookup(registers: Registers, slots: Slots, layer: int, query: Weights, key: Weights) -> None:
    p = registers.parameters
    asking = [("mark", p.distance_of(layer)), *([("place", 1)] if layer == 0 else [])]
    scale = math.sqrt(slots.size) / (KEY * NORMED)
    for kind, back in asking:
        column = registers.kind(kind)
        ask_back(slots, query, column, back)
        # BEGIN's score, once more in two parts.
        begin = (slots.position_nats - POSITION_NATS / 2) * scale * NORMED
        most = four_bits(begin / 2)
        query[slots.coarse, column] = most / NORMED
        query[slots.fine, column] = four_bits((begin - 2 * most) / (p.digits - 0.5 - four_bits(p.digits))) / NORMED
    position_keys(registers, slots, key)
    if layer:  # a place looks up nothing here; it reads BEGIN, whatever else the cache holds
        query[slots.coarse, registers.kind("place")] = four_bits(POSITION_NATS / 2 * scale * NORMED) / NORMED


def ask_back(slots: Slots, query: Weights, column: int, back: int) -> None:
    """Write a query for the key `back` positions back, for tokens with 1 in that column."""
    scale = math.sqrt(slots.size) / (KEY * NORMED)
    for (first, second), weight, frequency in zip(
        slots.pairs, slots.rotary.weights, slots.rotary.frequencies, strict=True
    ):
        peak = weight * slots.position_nats * scale
        query[first, column] = peak * math.cos(back * frequency)
        query[second, column] = -peak * math.sin(back * frequency)


def position_keys(registers: Registers, slots: Slots, key: Weights) -> None:
    for kind in ("place", "mark"):
        for first, _ in slots.pairs:
            key[first, registers.kind(kind)] = KEY / NORMED


def value_rows(registers: Registers, slots: Slots, layer: int, head: int) -> Iterator[tuple[int, int, int]]:
    """(column read, column written, value dimension) of everything that a head returns."""
    p = registers.parameters
    pair = p.showing.index(layer) * p.kv_heads + head
    for index, digit in enumerate(returned(p, head)):
        for x in range(p.base):
            column = digit * p.base + x
            yield registers.place + column, registers.found(layer) + column, index * p.base + x
    for kind in ("begin", "guard"):
        yield registers.kind(kind), registers.lost(layer, head), slots.lost_value
    for value in range(2):
        yield registers.bit(pair % p.bits, value), registers.shown(pair, value), slots.bit_value(value)
