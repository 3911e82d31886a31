"""The row copies of page_copy as Triton kernels, for any strides. One launch copies the rows of all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.compilers import grid_of

BLOCK_WORDS = 1024
"""Words that one program copies, over row borders, so that short or odd rows leave no lane idle."""


def copy_rows_triton(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """copy_rows_torch for int64 words. Index tensors lie on the kernel's device; a host side is pinned."""
    assert source.shape[0] == target.shape[0] and source.shape[2:] == target.shape[2:], "both sides have one row shape"
    _copy(target, target_rows, source, source_rows, len(target_rows))


def gather_rows_triton(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    _copy(target.unsqueeze(2), None, source.unsqueeze(2), rows, len(rows))


def scatter_rows_triton(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    _copy(target.unsqueeze(2), rows, source.unsqueeze(2), None, len(rows))


def _copy(
    target: torch.Tensor,
    target_rows: torch.Tensor | None,
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    count: int,
) -> None:
    """Copy `count` rows of all layers, both sides [L, U, r, W]; without ids a side is in order."""
    layers, words = target.shape[0], target.shape[3]
    _check(target, target_rows)
    _check(source, source_rows)
    if count * words * layers:
        _COPY[grid_of(triton.cdiv(count * words, BLOCK_WORDS), layers)](
            target,
            target_rows,
            source,
            source_rows,
            count * words,
            *target.stride()[:3],
            *source.stride()[:3],
            TARGET_R=target.shape[2],
            SOURCE_R=source.shape[2],
            W=words,
            BLOCK=BLOCK_WORDS,
            enable_fp_fusion=False,  # no floats here; left unset, a release that changes the default would warn
        )


def _check(side: torch.Tensor, ids: torch.Tensor | None) -> None:
    assert side.dtype == torch.int64 and (side.stride(3) == 1 or side.shape[3] < 2), (
        "rows are int64 words that lie side by side"
    )
    assert ids is None or (ids.dtype == torch.int64 and ids.is_contiguous()), "ids are int64, side by side"


def _row_at(ids, pair, inside, unit_stride, row_stride, R: tl.constexpr):  # type: ignore[no-untyped-def]
    row = pair if ids is None else tl.load(ids + pair, mask=inside, other=0)
    return (row // R) * unit_stride + (row % R) * row_stride


_ROW_AT = triton.jit(_row_at)


def _copy_words(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    target,
    target_rows,
    source,
    source_rows,
    count,
    target_layer,
    target_unit,
    target_row,
    source_layer,
    source_unit,
    source_row,
    TARGET_R: tl.constexpr,
    SOURCE_R: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: one block of all named words of one layer, row after row.
    base = tl.program_id(0).to(tl.int64) * BLOCK
    layer = tl.program_id(1).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside = offset < count - base
    place = (base % W).to(tl.int32) + offset  # 32-bit division: that of a 64-bit number takes longer than the copy
    pair, word = base // W + place // W, place % W
    to = layer * target_layer + _ROW_AT(target_rows, pair, inside, target_unit, target_row, TARGET_R)
    at = layer * source_layer + _ROW_AT(source_rows, pair, inside, source_unit, source_row, SOURCE_R)
    tl.store(target + to + word, tl.load(source + at + word, mask=inside, other=0), mask=inside)


_COPY = triton.jit(_copy_words)
IS_INTERPRETED = not isinstance(_COPY, triton.JITFunction)
"""True if triton runs kernels on the CPU (TRITON_INTERPRET=1)."""
