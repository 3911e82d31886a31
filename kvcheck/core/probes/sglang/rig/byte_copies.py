"""Moves: where the bytes of a copy lie, worked out from first bytes, indices and sizes, as compiled copies do it.

Invariants:
- Nothing here looks at the shape of memory that is given by its first byte; a wrong size gives wrong places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Place = Callable[[int, int], Sequence[int]]
"""(layer, index) -> addresses of the item's parts."""


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """Bytes from one address to another."""

    source: int
    target: int
    size: int


Pieces = Sequence[Sequence[ByteCopy]]
"""What a copy does, in pieces that may run one after the other."""


class Refused(Exception):
    """What the compiled copy would refuse."""


def reads_lists_on(backend: str, device: str) -> str | None:
    """The side on which copies of an `io_backend` need their lists of indices; None: they take them from either.

    A kernel reads them on the device. Direct copies take them to the host themselves, both and before anything else: a
    list on the device costs a wait and harms nobody.
    """
    return device if backend == "kernel" else None


def paired(sources: torch.Tensor, targets: torch.Tensor) -> list[tuple[int, int]]:
    """Source and target indices."""
    if sources.numel() != targets.numel():
        raise Refused(f"{sources.numel()} and {targets.numel()} indices")
    if sources.dtype is not torch.int64 or targets.dtype is not torch.int64:
        raise Refused(f"indices of {sources.dtype} and {targets.dtype}, expected torch.int64")
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def moved(source: Place, target: Place, pairs: Sequence[tuple[int, int]], *, layer: int, size: int) -> list[ByteCopy]:
    """Parts of `size` bytes of one layer."""
    return [
        ByteCopy(start, end, size)
        for one, other in pairs
        for start, end in zip(source(layer, one), target(layer, other), strict=True)
    ]


def rows(start: int, apart: int) -> Place:
    """Memory of one layer; its items begin `apart` bytes from each other."""
    return lambda _, index: (start + index * apart,)


def pages(start: int, page: int, item: int) -> Place:
    """Items with all their layers behind each other. page: bytes of all layers."""
    return lambda layer, index: (start + index * page + layer * item,)


def by_head(start: int, item: int, heads: int) -> Place:
    """Rows of one layer, head by head."""
    return lambda _, index: [start + index * item + head * (item // heads) for head in range(heads)]


def head_first(start: int, token: int, item: int, *, page_size: int, heads: int) -> Place:
    """[pages, heads, page_size, layers, head] from `start`. token: bytes of a token in all layers."""

    def place(layer: int, index: int) -> list[int]:
        page, row = divmod(index, page_size)
        before = [(page * heads + head) * page_size + row for head in range(heads)]
        return [start + at * (token // heads) + layer * (item // heads) for at in before]

    return place


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, count) of neighbours on both sides."""
    found: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if found and (source, target) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((source, target, 1))
    return found
