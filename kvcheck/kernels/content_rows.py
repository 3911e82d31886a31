"""Comparison of content rows with their expected words, in one pass, without waiting for a device.

rows: [..., W], codes: [...], mask: [W]; word w of a row is expected to be its code XOR mask[w].
"""

from __future__ import annotations

from types import ModuleType
from typing import cast

import torch

from kvcheck.kernels.compilers import asks_numba, asks_triton
from kvcheck.kernels.content import differing_torch, low_half

BLOCK_BYTES = 512 << 10
"""Expected rows that the blocked form makes at a time: they stay in the L2 cache until they are compared."""


def differing(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if rows.device.type == "cpu" and rows.numel() * rows.element_size() <= BLOCK_BYTES:
        return differing_torch(rows, codes, mask)  # one block of its own
    flat, per_row = rows.reshape(-1, rows.shape[-1]), codes.reshape(-1)
    _check(flat, per_row, mask)
    if kernels := _kernels(rows):
        return cast(torch.Tensor, kernels.differing_triton(flat, per_row, mask)).view(codes.shape)
    if rows.device.type != "cpu":
        return differing_torch(rows, codes, mask)
    if asks_numba(flat):
        from kvcheck.kernels.content_rows_numba import differing_numba

        return differing_numba(flat, per_row, mask).view(codes.shape)
    return _differing_blocks(flat, per_row, mask).view(codes.shape)


def _kernels(rows: torch.Tensor) -> ModuleType | None:
    if not asks_triton(rows):
        return None
    from kvcheck.kernels import content_rows_triton

    return content_rows_triton if rows.is_cuda or content_rows_triton.IS_INTERPRETED else None


def _differing_blocks(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    differing = torch.zeros(len(rows), dtype=torch.bool)
    if not rows.numel():
        return differing
    if rows.dtype == torch.int32:
        codes, mask = low_half(codes), low_half(mask)
    rows = rows.contiguous()
    row_bytes = rows.shape[1] * rows.element_size()
    step = min(len(rows), max(1, BLOCK_BYTES // row_bytes))
    # Python compares two byte strings by memcmp, which makes no mask. Every torch comparison makes one.
    memory = bytearray(step * row_bytes)
    block, seen = torch.frombuffer(memory, dtype=rows.dtype).view(step, -1), rows.numpy()
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        expected = torch.bitwise_xor(codes[at : at + step, None], mask, out=block[: len(part)])
        wanted = memory if len(part) == step else memory[: len(part) * row_bytes]
        if wanted != seen[at : at + step].data:
            differing[at : at + step] = (part != expected).any(-1)
    return differing


def _check(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> None:
    assert rows.ndim == 2 and codes.shape == rows.shape[:1] and mask.shape == rows.shape[1:], (
        f"rows are [T, W], codes [T], mask [W], got {[*rows.shape]}, {[*codes.shape]}, {[*mask.shape]}"
    )
    assert rows.dtype in (torch.int64, torch.int32) and codes.dtype == mask.dtype == torch.int64, "integer words"
