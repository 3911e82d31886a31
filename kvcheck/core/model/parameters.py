"""Parameters of a known-answer model: sizes of its architecture, its alphabet, and its two tests.

Invariants:
- Equal `Parameters` give the same model, byte for byte, and the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any

from kvcheck.core.base.errors import UsageError

# Bytes of one value in the model's folder. fp8-kv: weights in bf16, made so that a cache in FP8 E4M3 with scale 1 is
# exact enough.
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8-kv": 2}
KV_SCALES = (1, 2, 4, 8, 16)
"""Powers of two keep every digit exact. A scale below 1 would lift keys above 448, the maximum of FP8 E4M3."""
BITS_A_TOKEN = 8  # of the position test: 256 values keep the vocabulary small at any number of layers and heads


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's lookups. hops: a place, by content. shows: a mark, by its position."""

    hops: bool = True
    shows: bool = True
    is_windowed: bool = False
    is_state: bool = False


FULL = LayerKind()
WINDOWED = LayerKind(hops=False, is_windowed=True)
STATE = LayerKind(is_state=True)
KINDS_OF: Mapping[str, tuple[LayerKind, ...]] = {"gpt-oss": (WINDOWED, FULL), "qwen3-next": (STATE, STATE, STATE, FULL)}
"""Kinds of an architecture's layers, repeated from layer 0 on; without a row all are FULL."""
INDEXED = frozenset({"deepseek-v32"})
"""Architectures with an indexer, which picks the positions that attention reads."""
LEAST_TOP_K = 4  # BEGIN, GUARD, and a place that a prompt lists twice
MOST_TOP_K = 2048  # that any engine's kernels take
STATE_DISTANCE = 3  # that a state layer reads back in the position test: as far as its convolution reaches
STATE_KEYS = STATE_DISTANCE + 1  # of the position test in a state: a mark replaces the one that is no longer read
MOST_NODES = 1 << 17  # also the longest request: rotary weights are searched over that many positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """group: query heads of one KV head. length: of prompt and answer together. nodes: tokens that a walk can visit.
    digits, base: of a node's code; KV head d % kv_heads returns digit d. distance: positions that the position test
    reads back, except in layers with a window or a state; 0: a mark reads itself. kv_scale: the largest scale of a
    cache in FP8, which divides keys or values; 1: none. window: positions that a token of a windowed layer reads,
    itself included. top_k: positions that an indexer picks for a token."""

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
    window: int = 0
    kv_scale: int = 1
    top_k: int = 0

    def __post_init__(self) -> None:
        check_sizes(
            **{name: getattr(self, name) for name in ("layers", "kv_heads", "group", "head_dim", "length", "dtype")}
        )
        if not 16 <= self.nodes <= MOST_NODES:
            raise UsageError(f"nodes of a known-answer model are from 16 to {MOST_NODES}; got {self.nodes}")
        if not 0 <= self.distance < self.length:
            raise UsageError(f"distance is from 0 to length - 1 ({self.length - 1}); got {self.distance}")
        if self.windowed and not 4 <= self.window <= self.length:
            raise UsageError(f"window is from 4 to length ({self.length}); got {self.window}")
        if self.window and not self.windowed:
            raise UsageError(f"{self.family} has no layer with a window; got a window of {self.window}")
        if self.kv_scale not in KV_SCALES:
            raise UsageError(f"kv-scale is one of {', '.join(map(str, KV_SCALES))}; got {self.kv_scale}")
        if self.kv_scale > 1 and self.dtype != "fp8-kv":
            raise UsageError(
                f"kv-scale {self.kv_scale} is for a cache in FP8: ask for --dtype fp8-kv; got {self.dtype}"
            )
        self._check_top_k()
        if not self.hopping:
            raise UsageError(f"{self.layers} layers of {self.family} make no hop of a walk; ask for more --layers")
        if self.digits < max(self.kv_heads, 2) or self.base ** (self.digits - 1) < self.nodes:
            raise UsageError(
                f"{self.digits} digits of base {self.base} cannot number {self.nodes} nodes, check one of them, "
                f"and give each of {self.kv_heads} KV heads one"
            )

    def _check_top_k(self) -> None:
        most = min(MOST_TOP_K, self.length - 1)
        if self.family in INDEXED and not LEAST_TOP_K <= self.top_k <= most:
            raise UsageError(
                f"top-k is from {LEAST_TOP_K} to {most}, less than the length, so that rows are left out; "
                f"got {self.top_k}"
            )
        if self.top_k and self.family not in INDEXED:
            raise UsageError(f"{self.family} has no indexer; got a top-k of {self.top_k}")

    def kind(self, layer: int) -> LayerKind:
        return _kind(self.family, layer)

    @property
    def hopping(self) -> tuple[int, ...]:
        return tuple(layer for layer in _layers_that(self.family, self.layers, "hops") if layer)

    @property
    def showing(self) -> tuple[int, ...]:
        return _layers_that(self.family, self.layers, "shows")

    @property
    def windowed(self) -> tuple[int, ...]:
        return _layers_that(self.family, self.layers, "is_windowed")

    def distance_of(self, layer: int) -> int:
        """Positions that a layer reads back in the position test; in a window, to its first one."""
        kind = self.kind(layer)
        if kind.is_state:
            return STATE_DISTANCE
        return self.window - 1 if kind.is_windowed else self.distance

    @property
    def has_state(self) -> bool:
        return bool(_layers_that(self.family, self.layers, "is_state"))

    def scales(self, layer: int) -> tuple[float, float]:
        """Scales of a layer's keys and values in FP8. They differ by layer, so that another layer's are wrong."""
        if self.kv_scale == 1:
            return 1.0, 1.0
        most, least = float(self.kv_scale), self.kv_scale / 2
        return (least, most) if layer % 2 else (most, least)

    @property
    def farthest(self) -> int:
        """The largest distance of any layer. A state layer also needs the mark before the one that it reads."""
        return max(self.distance_of(layer) + self.kind(layer).is_state for layer in self.showing)

    @property
    def pairs(self) -> int:
        """(layer, KV head) pairs that return bits; pair p is layer showing[p // kv_heads], head p % kv_heads."""
        return len(self.showing) * self.kv_heads

    @property
    def bits(self) -> int:
        return min(BITS_A_TOKEN, self.pairs)

    @property
    def phases(self) -> int:
        """Each mark has a phase and shows the bits of a group of pairs. Phases are also a state's keys, and then a
        multiple of their number."""
        return -(-self.groups // STATE_KEYS) * STATE_KEYS if self.has_state else self.groups

    @property
    def groups(self) -> int:
        return math.ceil(self.pairs / self.bits)

    @property
    def hops(self) -> int:
        return len(self.hopping)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if _OPTIONAL.get(name) != value}

    @classmethod
    def from_json(cls, data: object) -> Parameters:
        known = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if not isinstance(data, dict) or set(data) | set(_OPTIONAL) != set(known):
            raise UsageError(f"parameters of a known-answer model are a table of {', '.join(known)}")
        for name, kind in known.items():
            if name in data and type(data[name]) is not kind:
                raise UsageError(f"parameter {name} of a known-answer model is {kind.__name__}; got {data[name]!r}")
        return cls(**data)


def _kind(family: str, layer: int) -> LayerKind:
    kinds = KINDS_OF.get(family, (FULL,))
    return kinds[layer % len(kinds)]


@cache  # called for every judged token
def _layers_that(family: str, layers: int, what: str) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if getattr(_kind(family, layer), what))


_OPTIONAL = {field.name: field.default for field in fields(Parameters) if field.default is not MISSING}


def check_sizes(*, layers: int, kv_heads: int, group: int, head_dim: int, length: int, dtype: str) -> None:
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

    A check digit is a sum of all others, modulo the base, by coefficients with an inverse (1, or base - 1), so one
    changed digit always changes it.
    """
    base, count = parameters.base, information_digits(parameters)
    own = [(node // base**i) % base for i in range(count)]
    checks = [
        sum(digit * ((base - 1) if (i >> check) & 1 and check else 1) for i, digit in enumerate(own)) % base
        for check in range(parameters.digits - count)
    ]
    return (*own, *checks)


def information_digits(parameters: Parameters) -> int:
    count = 1
    while parameters.base**count < parameters.nodes:
        count += 1
    return count


def shown_pair(parameters: Parameters, phase: int, bit: int) -> int:
    """The pair whose bit is shown after a mark of that phase; a short last group borrows from the one before."""
    pair = phase % parameters.groups * parameters.bits + bit
    return pair if pair < parameters.pairs else pair - parameters.bits
