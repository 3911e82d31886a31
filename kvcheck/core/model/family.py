"""The interface of an architecture, and the fit of a model's alphabet into its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model.lookups import Slots
from kvcheck.core.model.parameters import MOST_NODES, Parameters

BASES = (4, 2, 8)  # in the order tried: base 4 needs the fewest dimensions for a number of nodes, with base 2 as good


@dataclass(frozen=True, slots=True)
class Family:
    """room: (head_dim, length) -> dimensions for a node's one-hot digits. group, head_dim: defaults. fixed: those of
    the two without an alternative. has_scales: whether its cache in FP8 can have scales. window, top_k: largest
    defaults, besides a quarter of the length; 0: none. most_nodes: that its layers can distinguish."""

    tensors: Callable[[Parameters], Iterator[tuple[str, npt.NDArray[np.float32]]]]
    config: Callable[[Parameters], dict[str, object]]
    slots: Callable[[Parameters], Slots]
    room: Callable[[int, int], int]
    group: int = 2
    head_dim: int = 64
    fixed: frozenset[str] = frozenset()
    has_scales: bool = False
    window: int = 0
    top_k: int = 0
    most_nodes: int = MOST_NODES

    def size(self, name: str, given: int | None) -> int:
        """Raises UsageError if the architecture lacks the given size."""
        only = int(getattr(self, name))
        if given is not None and given != only and name in self.fixed:
            raise UsageError(f"--{name.replace('_', '-')}: this architecture has {only} only; got {given}")
        return only if given is None else given


def fit_digits(*, nodes: int, kv_heads: int, room: int) -> tuple[int, int]:
    """(digits, base): the fewest digits that give each KV head one, in the first base that fits. Raises UsageError."""
    needs = []
    for base in BASES:
        count = 1
        while base**count < nodes:
            count += 1
        digits = max(count + 1, kv_heads, 2)
        if digits * base <= room:
            return digits, base
        needs.append(f"{digits * base} in base {base}")
    raise UsageError(
        f"{nodes} nodes over {kv_heads} KV heads need more dimensions of a head ({', '.join(needs)}) than the {room} "
        "that hold content at this length; ask for a larger --head-dim, a smaller --length, or fewer --nodes"
    )
