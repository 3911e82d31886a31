"""Digest of selected rows, without a gathered copy of them."""

from __future__ import annotations

import torch

from kvcheck.kernels.compilers import asks_numba_of, asks_triton
from kvcheck.kernels.content import as_signed
from kvcheck.kernels.digest import combined, digest, digest_torch, start_of
from kvcheck.kernels.page_copy import gather_rows


def digest_rows_torch(source: torch.Tensor, rows: torch.Tensor, *, key: int) -> torch.Tensor:
    """Digest of int64 words source[l, rows[i], w] in the order l, i, w: an int64 scalar on their device.

    source: [L, R, W], of any strides; rows: [n], each at least 0 and less than R; a row named twice counts twice.
    """
    return digest_torch(source.index_select(1, rows).reshape(-1), key=key)


def digest_rows(source: torch.Tensor, rows: torch.Tensor, *, key: int) -> torch.Tensor:
    assert source.dtype == torch.int64 and source.ndim == 3 and rows.ndim == 1, "words are int64 [L, R, W], rows [n]"
    if asks_triton(source):
        from kvcheck.kernels import digest_rows_triton

        if source.is_cuda or digest_rows_triton.IS_INTERPRETED:
            return combined(digest_rows_triton.partial_digests_triton(source, rows, as_signed(start_of(key, 0))))
    if source.device.type != "cpu":
        return digest_rows_torch(source, rows, key=key)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= source.shape[1]):
        raise IndexError(f"expected rows of 0 to {source.shape[1] - 1}, got {int(rows.min())} to {int(rows.max())}")
    count = source.shape[0] * len(rows) * source.shape[2]
    if asks_numba_of(count * 8) and source.stride(2) == 1:
        from kvcheck.kernels.digest_numba import digest_rows_numba

        return digest_rows_numba(source, rows, start_of(key, 0))
    words = torch.empty((source.shape[0], len(rows), source.shape[2]), dtype=torch.int64)
    gather_rows(words, source, rows)
    return digest(words.view(-1), key=key)
