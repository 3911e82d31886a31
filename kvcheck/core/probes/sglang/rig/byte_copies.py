"""Byte copies: source and target addresses of a copy, from start addresses, indices and sizes, as in the kernels.

Memory given by its start address has no known shape: a wrong size gives wrong addresses, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Place = Callable[[int, int], Sequence[int]]
"""(layer, index) -> addresses of the parts of the item."""


class ByteCopy(NamedTuple):
    """A tuple, which is made faster than a dataclass: a schedule makes many thousands."""

    source: int
    target: int
    size: int


Pieces = Sequence[Sequence[ByteCopy]]
"""A copy, in sequential pieces."""


class CopyRefused(Exception):
    """The compiled copy refuses this call."""


def reads_lists_on(backend: str, device: str) -> str | None:
    """Return the side on which copies of an `io_backend` need their index lists; None: on either.

    A kernel reads the lists on the device. Direct copies first take both lists to the host: a list on the device costs
    a wait and is no error.
    """
    return device if backend == "kernel" else None


def paired(sources: torch.Tensor, targets: torch.Tensor) -> list[tuple[int, int]]:
    if sources.numel() != targets.numel():
        raise CopyRefused(f"{sources.numel()} and {targets.numel()} indices")
    if sources.dtype is not torch.int64 or targets.dtype is not torch.int64:
        raise CopyRefused(f"indices of {sources.dtype} and {targets.dtype}, expected torch.int64")
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def moved(source: Place, target: Place, pairs: Sequence[tuple[int, int]], *, layer: int, size: int) -> list[ByteCopy]:
    return [
        ByteCopy(start, end, size)
        for one, other in pairs
        for start, end in zip(source(layer, one), target(layer, other), strict=True)
    ]


def rows(start: int, apart: int) -> Place:
    return lambda _, index: (start + index * apart,)


def pages(start: int, page: int, item: int) -> Place:
    """Items with their layers one behind the other. page: bytes of all layers."""
    return lambda layer, index: (start + index * page + layer * item,)


def by_head(start: int, item: int, heads: int) -> Place:
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
