"""What a known-answer model is made from: sizes of its architecture, of its alphabet, and its two tests.

Invariants:
- Two equal `Parameters` give the same model, byte for byte, and the same answers.
- Sizes that cannot hold the construction are refused when the value is made.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcheck.core.base.errors import UsageError

# Bytes of one value in the model's folder. fp8-kv: weights in bf16, made so that a cache in FP8 E4M3 with scale 1 is
# exact enough.
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8-kv": 2}
BITS_A_TOKEN = 8  # of the position test: 256 values keep the vocabulary small at any number of layers and heads
MOST_NODES = 1 << 17  # also the longest request: rotary weights are searched over that many positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Sizes of one known-answer model.

    group: query heads of one KV head. length: most positions of a request, prompt and answer together.
    nodes: distinct tokens that a walk can visit. digits, base: how a node is written, digit d is returned by KV head
    d % kv_heads. distance: how many positions back the position test reads; 0: a mark reads itself.
    """

    family: str
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    length: int
    dtype: str
    nodes: int
    digits: int
    base: int
    distance: int

    def __post_init__(self) -> None:
        check_sizes(
            **{name: getattr(self, name) for name in ("layers", "kv_heads", "group", "head_dim", "length", "dtype")}
        )
        if not 16 <= self.nodes <= MOST_NODES:
            raise UsageError(f"nodes of a known-answer model are from 16 to {MOST_NODES}; got {self.nodes}")
        if not 0 <= self.distance < self.length:
            raise UsageError(f"distance is from 0 to length - 1 ({self.length - 1}); got {self.distance}")
        if self.digits < max(self.kv_heads, 2) or self.base ** (self.digits - 1) < self.nodes:
            raise UsageError(
                f"{self.digits} digits of base {self.base} cannot number {self.nodes} nodes, check one of them, "
                f"and give each of {self.kv_heads} KV heads one"
            )

    @property
    def pairs(self) -> int:
        """(layer, KV head) pairs; pair p is layer p // kv_heads, head p % kv_heads."""
        return self.layers * self.kv_heads

    @property
    def bits(self) -> int:
        """Bits of one token of the position test."""
        return min(BITS_A_TOKEN, self.pairs)

    @property
    def phases(self) -> int:
        """Groups of `bits` pairs; each token of the position test shows the bits of one group."""
        return math.ceil(self.pairs / self.bits)

    @property
    def hops(self) -> int:
        """Steps of the walk from one token of an answer to the next: layer 0 finds the node, the others hop."""
        return self.layers - 1

    def to_json(self) -> dict[str, Any]:
        """For known_answers.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Parameters:
        """Raises UsageError where the table is not one that `to_json` makes."""
        known = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != set(known):
            raise UsageError(f"parameters of a known-answer model are a table of {', '.join(known)}")
        for name, kind in known.items():
            if type(data[name]) is not kind:
                raise UsageError(f"parameter {name} of a known-answer model is {kind.__name__}; got {data[name]!r}")
        return cls(**data)


def check_sizes(*, layers: int, kv_heads: int, group: int, head_dim: int, length: int, dtype: str) -> None:
    """Raise UsageError for the first size that no known-answer model has: what, expected, got."""
    for name, size, least, most in (
        ("layers", layers, 2, 256),
        ("kv-heads", kv_heads, 1, 64),
        ("group", group, 1, 64),
        ("head-dim", head_dim, 64, 256),
        ("length", length, 64, MOST_NODES),
    ):
        if not least <= size <= most:
            raise UsageError(f"{name} of a known-answer model is from {least} to {most}; got {size}")
    if head_dim % 64:
        raise UsageError(f"head-dim of a known-answer model is a multiple of 64; got {head_dim}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} of a known-answer model; known: {', '.join(DTYPES)}")


def node_digits(parameters: Parameters, node: int) -> tuple[int, ...]:
    """The digits of a node: its number in the base, then check digits. Two nodes differ in at least two digits.

    A check digit is a sum, modulo the base, of all others by coefficients that have an inverse (1, or base - 1), so
    that one changed digit always changes it.
    """
    base, count = parameters.base, information_digits(parameters)
    own = [(node // base**i) % base for i in range(count)]
    checks = [
        sum(digit * ((base - 1) if (i >> check) & 1 and check else 1) for i, digit in enumerate(own)) % base
        for check in range(parameters.digits - count)
    ]
    return (*own, *checks)


def information_digits(parameters: Parameters) -> int:
    """Digits that number the nodes; the others are check digits."""
    count = 1
    while parameters.base**count < parameters.nodes:
        count += 1
    return count
