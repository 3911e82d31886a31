"""Row copies between pool buffers, packed memory and host pages.

Invariants:
- A row belongs to one id: a token, a page with all its tokens, or a slot.
- Bytes are moved, never converted; both sides have the same trailing shape and dtype.
- Index tensors are read when the copy runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from kvcheck.kernels.compilers import asks_triton
from kvcheck.kernels.page_copy_host import gather_blocks, scatter_blocks


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
