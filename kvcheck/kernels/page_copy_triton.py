"""The row copy of page_copy as one Triton kernel; importing this module needs triton.

Invariants:
- It means what `copy_rows_torch` means, for every layout: a layout is nothing but strides.
- Addresses are 64-bit and every load and store is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 256
"""Most words of a row that one program copies."""


def copy_rows_triton(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """copy_rows_torch for int64 words. Index tensors lie where the kernel runs; a side on the host is pinned."""
    layers, _, rows_of_unit, words = target.shape
    assert source.shape[0] == layers and source.shape[2:] == target.shape[2:], "both sides have one trailing shape"
    assert target.dtype == source.dtype == target_rows.dtype == source_rows.dtype == torch.int64, "words and ids"
    assert target.stride(3) == source.stride(3) == 1, "the words of a row lie side by side"
    assert target_rows.is_contiguous() and source_rows.is_contiguous(), "ids lie side by side"
    count = len(target_rows)
    if not count:
        return
    block = min(BLOCK_WORDS, triton.next_power_of_2(words))
    _KERNEL[(count, layers, triton.cdiv(words, block))](
        target,
        target_rows,
        source,
        source_rows,
        rows_of_unit,
        words,
        *target.stride()[:3],
        *source.stride()[:3],
        BLOCK=block,
        enable_fp_fusion=False,  # no floats here; a release that changes the default warns whoever does not say
    )


def _copy_row(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    target,
    target_rows,
    source,
    source_rows,
    rows_of_unit,
    words,
    target_layer,
    target_unit,
    target_row,
    source_layer,
    source_unit,
    source_row,
    BLOCK: tl.constexpr,
):
    # One program: one block of words of one row of one layer.
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    into = tl.load(target_rows + pair)
    out_of = tl.load(source_rows + pair)
    to = layer * target_layer + (into // rows_of_unit) * target_unit + (into % rows_of_unit) * target_row
    at = layer * source_layer + (out_of // rows_of_unit) * source_unit + (out_of % rows_of_unit) * source_row
    inside = word < words
    tl.store(target + to + word, tl.load(source + at + word, mask=inside, other=0), mask=inside)


_KERNEL = triton.jit(_copy_row)
IS_INTERPRETED = not isinstance(_KERNEL, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
