"""What an architecture has to give, and how a model's alphabet is fitted into its heads.

Invariants:
- The smallest number of digits is taken that gives each KV head one, with a base whose digits fit into a head.
"""

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
    """One architecture.

    tensors: (name, weights) of every tensor, by Hugging Face's names. config: what goes into config.json.
    slots: what each dimension of a head is for. room: (head_dim, length) -> dimensions that can hold a node's digits,
    as one-hot digits.
    group, head_dim: what `kvcheck model make` takes where neither is given. fixed: the sizes among them of which the
    architecture has one value only. has_scales: whether its cache in FP8 can have scales.
    window, top_k: the most of --window and --top-k where none is given, besides a quarter of the length; 0 where no
    layer has one. most_nodes: that its layers can tell apart.
    """

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
        """The value of --group or --head-dim. Raises UsageError for one that the architecture does not have."""
        only = int(getattr(self, name))
        if given is not None and given != only and name in self.fixed:
            raise UsageError(f"--{name.replace('_', '-')}: this architecture has {only} only; got {given}")
        return only if given is None else given


def fit_digits(*, nodes: int, kv_heads: int, room: int) -> tuple[int, int]:
    """(digits, base) of a model with so many nodes. Raises UsageError where `room` dimensions hold no such number."""
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
