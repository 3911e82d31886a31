"""The row copies of page_copy as Triton kernels; importing this module needs triton.

Invariants:
- They give the results of the torch forms for every layout, since a layout is a set of strides.
- One launch copies the rows of all layers, for any width. Short or odd rows leave no lane idle.
- Addresses are 64-bit and every load and store is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.compilers import grid_of

BLOCK_WORDS = 1024
"""Words that one program copies, of as many rows as it takes."""
MOVED_WORDS = 4096
"""Words that one program of a move holds in registers until all of them are read."""
MOVED_ROWS = 1024
"""Longest list that is moved by one launch; from a longer one, a program could hold too little of a row."""


def copy_rows_triton(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """copy_rows_torch for int64 words. Index tensors lie where the kernel runs; a side on the host is pinned."""
    assert source.shape[0] == target.shape[0] and source.shape[2:] == target.shape[2:], "both sides have one row shape"
    _copy(target, target_rows, source, source_rows, len(target_rows))


def gather_rows_triton(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """gather_rows_torch for int64 words, where either side may be pinned memory of the host."""
    _copy(target.unsqueeze(2), None, source.unsqueeze(2), rows, len(rows))


def scatter_rows_triton(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """scatter_rows_torch for int64 words, where either side may be pinned memory of the host."""
    _copy(target.unsqueeze(2), rows, source.unsqueeze(2), None, len(rows))


def move_rows_triton(buffer: torch.Tensor, target_rows: torch.Tensor, source_rows: torch.Tensor) -> None:
    """move_rows_torch for int64 words."""
    layers, _, rows_of_unit, words = buffer.shape
    count = len(target_rows)
    _check(buffer, target_rows, source_rows)
    if count > MOVED_ROWS:  # the first launch reads into new memory, and the second one writes from there
        kept = buffer.new_empty((layers, count, 1, words))
        _copy(kept, None, buffer, source_rows, count)
        _copy(buffer, target_rows, kept, None, count)
    elif count * words * layers:
        rows = triton.next_power_of_2(count)
        block = min(triton.next_power_of_2(words), max(1, MOVED_WORDS // rows))
        _MOVE[grid_of(triton.cdiv(words, block), layers)](
            buffer,
            target_rows,
            source_rows,
            count,
            words,
            *buffer.stride()[:3],
            R=rows_of_unit,
            ROWS=rows,
            BLOCK=block,
            enable_fp_fusion=False,  # no floats here; a release that changes the default warns whoever does not say
        )


def _copy(
    target: torch.Tensor,
    target_rows: torch.Tensor | None,
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    count: int,
) -> None:
    """Copy `count` rows of all layers, both sides [L, U, r, W]. A side without ids has its units in order."""
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
            enable_fp_fusion=False,
        )


def _check(side: torch.Tensor, *ids: torch.Tensor | None) -> None:
    assert side.dtype == torch.int64 and (side.stride(3) == 1 or side.shape[3] < 2), (
        "rows are int64 words that lie side by side"
    )
    for each in ids:
        assert each is None or (each.dtype == torch.int64 and each.is_contiguous()), "ids are int64, side by side"


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


def _move_words(  # type: ignore[no-untyped-def]
    buffer,
    target_rows,
    source_rows,
    count,
    words,
    layer_stride,
    unit_stride,
    row_stride,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: some words of all rows of one layer, so that no other program writes what this one reads.
    layer = buffer + tl.program_id(1).to(tl.int64) * layer_stride
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, ROWS)[:, None]
    is_pair = pair < count
    inside = is_pair & (word < words)
    at = _ROW_AT(source_rows, pair, is_pair, unit_stride, row_stride, R)
    to = _ROW_AT(target_rows, pair, is_pair, unit_stride, row_stride, R)
    seen = tl.load(layer + at + word, mask=inside, other=0)
    tl.debug_barrier()  # all threads of a program have to read before one of them writes
    tl.store(layer + to + word, seen, mask=inside)


_COPY = triton.jit(_copy_words)
_MOVE = triton.jit(_move_words)
IS_INTERPRETED = not isinstance(_COPY, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
