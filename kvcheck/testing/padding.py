"""Padding: parts of rows that neither save nor load touches, which are no finding and not judged either.

Invariants:
- A part is untouched only if load left it in every row of the request, and the saved value does not have it.
- A part that the saved value has, and that load leaves out, stays a finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvcheck.testing.buffers import Buffer

TELLING = 4
"""Bytes that are enough to be known again among others: shorter runs are looked for as a part of the whole row."""


def untouched(
    held: Buffer, before: torch.Tensor, seen: torch.Tensor, wanted: torch.Tensor, saved: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The elements of a row that nobody moved, if all that is wrong lies in them; None if anything else is wrong.

    before, seen, wanted: [rows, bytes] before load, after it, and as saved. saved: the bytes of the saved tensors.
    Returns [elements] bool.
    """
    wrong = seen != wanted
    columns = wrong.any(0)
    if bool(columns.all()) or not torch.equal(seen[:, columns], before[:, columns]):
        return None
    columns = columns.view(-1, held.rows.element_size()).any(1)
    if bool(columns.all()):
        return None
    bits = columns.repeat_interleave(held.rows.element_size())
    kept = [bytes(each.tolist()) for each in saved]
    runs = [(start, end) for start, end in _runs(bits.tolist()) if end - start >= TELLING] or [(0, len(bits))]
    for row in wanted:
        if not any(bytes(row[start:end].tolist()) in each for start, end in runs for each in kept):
            return columns
    return None


def index_of(held: Buffer, columns: torch.Tensor) -> tuple[slice, ...] | slice | None:
    """These elements as an index of a row; None if they are no box, or if not all elements of a row are judged."""
    if held.used is not None or held.dtype.is_complex or len(columns) != math.prod(held.dims):
        return None
    box = columns.reshape(held.dims)
    sides = []
    for at, size in enumerate(held.dims):
        hit = torch.nonzero(box.movedim(at, 0).reshape(size, -1).any(1)).view(-1)
        sides.append(slice(int(hit[0]), int(hit[-1]) + 1))
    if not bool(box[tuple(sides)].all()):
        return None
    return sides[0] if len(sides) == 1 else tuple(sides)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of each run of true flags."""
    edges = [at for at in range(len(flags) + 1) if (at < len(flags) and flags[at]) != (at > 0 and flags[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
