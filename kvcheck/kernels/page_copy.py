"""Row copies between pool buffers and packed memory, on all layers at once.

Invariants:
- Bytes are moved, never converted; both sides have the same trailing shape and dtype.
- Index tensors are read when the copy runs.
"""

from __future__ import annotations

import torch


def gather_rows_torch(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """target[l, i] = source[l, rows[i]]. source: [L, R, W]; rows: [n]; target: [L, n, W], any place."""
    picked = source.index_select(1, rows)
    target.copy_(picked, non_blocking=True)


def scatter_rows_torch(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """target[l, rows[i]] = source[l, i]. target: [L, R, W]; rows: [n], no duplicates; source: [L, n, W], any place."""
    target.index_copy_(1, rows, source.to(target.device, non_blocking=True))


def copy_bytes_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a block of bytes of one shape."""
    target.copy_(source, non_blocking=True)


def fill_torch(target: torch.Tensor, value: int) -> None:
    """Set every element."""
    target.fill_(value)
