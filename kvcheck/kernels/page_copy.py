"""Row copies between pool buffers, packed memory and host pages.

Invariants:
- A row belongs to one id: a token, a page with all its tokens, or a slot.
- Bytes are moved, never converted; both sides have the same trailing shape and dtype.
- Index tensors are read when the copy runs.
- Rows out of range raise IndexError.
- A function returns False, with nothing written, if blocks do not pay, or while a torch dispatch mode is active,
  because an observer of tensor calls, such as the audit of footprints, cannot see numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kvcheck.kernels.compilers import asks_numba_of, asks_triton

LEAST_BLOCK_BYTES = 1024
"""Least bytes of one layer for which copying rows by blocks pays."""

FEW_BLOCKS = 4
WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LINE_BYTES = 64


def gather_rows_torch(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """target[l, i] = source[l, rows[i]]. source: [L, R, W]; rows: [n]; target: [L, n, W], on any device."""
    picked = source.index_select(1, rows)
    copy_block_torch(target, picked)


def scatter_rows_torch(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """target[l, rows[i]] = source[l, i], any devices. target: [L, R, W]; rows: [n], no duplicate; source: [L, n, W]."""
    if source.device != target.device:
        arrived = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        copy_block_torch(arrived, source)
        source = arrived
    target.index_copy_(1, rows, source)


def gather_rows(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    if kernels := _kernels(target, source):
        kernels.gather_rows_triton(target, source, rows)
    elif not gather_blocks(target, source, rows):
        gather_rows_torch(target, source, rows)


def scatter_rows(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    if kernels := _kernels(target, source):
        kernels.scatter_rows_triton(target, source, rows)
    elif not scatter_blocks(target, source, rows):
        scatter_rows_torch(target, source, rows)


def copy_rows_torch(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """target[l, u, o] = source[l, v, p] for each pair of rows u * r + o, v * r + p and each layer l.

    target: [L, U, r, W], source: [L, V, r, W], of any strides; target_rows: [n], no duplicates; source_rows: [n].
    Between host and device the calling thread waits for the stream. `copy_rows` does not wait if triton is installed.
    """
    rows_of_unit = target.shape[2]
    # For a copy to another device the ids are copied first, which waits until the stream has reached this copy.
    into, out_of = target_rows.to(target.device), source_rows.to(source.device)
    picked = source[:, out_of // rows_of_unit, out_of % rows_of_unit]
    target[:, into // rows_of_unit, into % rows_of_unit] = picked.to(target.device)


def copy_rows(target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor) -> None:
    if kernels := _kernels(target, source):
        kernels.copy_rows_triton(target, target_rows, source, source_rows)
        return
    copy_rows_torch(target, target_rows, source, source_rows)


def copy_block_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source, of one shape and any strides, in stream order, for any devices."""
    if target.device == source.device:
        target.copy_(source)
        return
    # Torch packs a strided host block at once on the calling thread, so it would read the block before the stream has
    # reached the copy. So host memory is copied in contiguous blocks.
    host = target if target.device.type == "cpu" else source
    if not host.is_contiguous():
        for inner_target, inner_source in zip(target, source, strict=True):
            copy_block_torch(inner_target, inner_source)
    else:
        target.copy_(source, non_blocking=True)  # a strided device side is packed there, in the order of the stream


def copy_bytes_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def copies_to_host(source: torch.Tensor) -> Callable[[], torch.Tensor | bytearray]:
    """Return a function that copies the current bytes of `source` [n] uint8 to new host memory when it runs.

    From a device the copy is complete once the stream has reached it. On a CPU the result is a bytearray, because
    making a tensor takes as long as copying a small row.
    """
    if source.is_cuda:
        return lambda: torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
    return partial(bytearray, source.numpy().data)


def fill_torch(target: torch.Tensor, value: int) -> None:
    target.fill_(value)


def _kernels(*sides: torch.Tensor) -> ModuleType | None:
    """The kernels if they can run: on a device if all host sides are pinned, on the CPU if triton interprets."""
    if not asks_triton(*sides):
        return None
    from kvcheck.kernels import page_copy_triton

    is_on_device = any(side.is_cuda for side in sides) and all(side.is_cuda or side.is_pinned() for side in sides)
    return page_copy_triton if page_copy_triton.IS_INTERPRETED or is_on_device else None


def gather_blocks(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> bool:
    if (ids := _ids(target, source, rows)) is None:
        return False
    if _is_much(target):
        from kvcheck.kernels.page_copy_numba import copy_runs_numba

        copy_runs_numba(target, np.arange(len(ids)), source, ids)
        return True
    if (blocks := _blocks(source, ids)) is None:
        return False
    into, out_of = _memory(target), _memory(source)
    for at, row, count in blocks.spans():
        into[:, at : at + count] = out_of[:, row : row + count]
    if blocks.are_many:
        for to, layer in zip(into, out_of, strict=True):
            # No row is out of range, so clipping changes nothing. It saves numpy a second copy.
            _by(layer, blocks.size).take(blocks.ids, 0, _by(to[: blocks.whole], blocks.size), "clip")
    return True


def scatter_blocks(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> bool:
    if (ids := _ids(source, target, rows)) is None:
        return False
    if _is_much(source):
        from kvcheck.kernels.page_copy_numba import copy_runs_numba

        copy_runs_numba(target, ids, source, np.arange(len(ids)))
        return True
    if (blocks := _blocks(target, ids)) is None:
        return False
    into, out_of = _memory(target), _memory(source)
    for at, row, count in blocks.spans():
        into[:, row : row + count] = out_of[:, at : at + count]
    if blocks.are_many:
        for to, layer in zip(into, out_of, strict=True):
            _by(to, blocks.size)[blocks.ids] = _by(layer[: blocks.whole], blocks.size)
    return True


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Rows as blocks of `size` neighbours, with ids, and a shorter tail (first row, count)."""

    # rows   [ 128 .. 191 | 64 .. 127 | 320 .. 350 ]      blocks 2, 1 of 64 rows, a tail of 31 from row 320

    ids: npt.NDArray[np.int64]
    size: int
    tail: tuple[int, int] | None

    @property
    def whole(self) -> int:
        return len(self.ids) * self.size

    @property
    def are_many(self) -> bool:
        return len(self.ids) > FEW_BLOCKS

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(place, first row, count) of each copy over all layers: the tail, and the blocks if they are few."""
        if not self.are_many:
            for number, block in enumerate(self.ids.tolist()):
                yield number * self.size, block * self.size, self.size
        if self.tail is not None:
            yield self.whole, *self.tail


def _ids(packed: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> npt.NDArray[np.int64] | None:
    """The rows of `pool`, checked to be in range; None if this module cannot move them."""
    if any(each.device.type != "cpu" for each in (packed, pool, rows)) or not len(rows):
        return None
    if (packed.dtype, packed.shape[::2]) != (pool.dtype, pool.shape[::2]):  # torch raises its own error
        return None
    if torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined,no-untyped-call,unused-ignore]
        return None
    if any(each.stride(2) != 1 or each.stride(1) != each.shape[2] for each in (packed, pool)):
        return None
    ids: npt.NDArray[np.int64] = rows.numpy()
    if ids.min() < 0 or ids.max() >= pool.shape[1] or len(ids) != packed.shape[1]:
        raise IndexError(
            f"expected {packed.shape[1]} rows of 0 to {pool.shape[1] - 1}, got {len(ids)}, {ids.max()} most"
        )
    return ids


def _is_much(packed: torch.Tensor) -> bool:
    row_bytes = packed.shape[2] * packed.element_size()
    return row_bytes >= LINE_BYTES and row_bytes % 8 == 0 and asks_numba_of(packed.numel() * packed.element_size())


def _blocks(pool: torch.Tensor, ids: npt.NDArray[np.int64]) -> _Blocks | None:
    """The largest blocks of neighbouring rows of `pool`; None if they are too small to pay."""
    starts = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1  # where a row does not follow the one before
    counts = np.diff(starts, prepend=0)
    size = math.gcd(int(np.gcd.reduce(ids[starts], initial=int(ids[0]))), int(np.gcd.reduce(counts, initial=0)))
    size = math.gcd(size, pool.shape[1])
    if min(size, len(ids)) * pool.shape[2] * pool.element_size() < LEAST_BLOCK_BYTES:
        return None
    whole = len(ids) // size * size
    tail = (int(ids[whole]), len(ids) - whole) if whole < len(ids) else None
    return _Blocks(ids[:whole:size] // size, size, tail)


def _memory(rows: torch.Tensor) -> npt.NDArray[np.signedinteger]:
    """View the memory as integers, since numpy lacks some of torch's types."""
    return rows.view(WHOLE_NUMBERS[rows.element_size()]).numpy()


def _by(rows: npt.NDArray[np.signedinteger], size: int) -> npt.NDArray[np.signedinteger]:
    return rows.reshape(len(rows) // size, size * rows.shape[1])
