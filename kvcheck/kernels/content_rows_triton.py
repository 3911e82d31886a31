"""differing_torch as a Triton kernel that touches each word once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096
"""Words that one program compares. Blocks ignore row borders, so short or odd rows leave no lane idle."""
WARPS = 8


def differing_triton(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    programs = triton.cdiv(rows.numel(), BLOCK_WORDS)
    differing = torch.zeros(len(rows), dtype=torch.uint8, device=rows.device)
    if programs:
        _DIFFERING[(programs,)](
            rows,
            codes,
            mask.contiguous(),
            differing,
            rows.numel(),
            *rows.stride(),
            codes.stride(0),
            WIDE=rows.shape[1],
            IS_PACKED=rows.is_contiguous(),
            BLOCK=BLOCK_WORDS,
            num_warps=WARPS,
            enable_fp_fusion=False,  # no floats here; left unset, a release that changes the default would warn
        )
    return differing.view(torch.bool)


def _compare_block(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    rows,
    codes,
    mask,
    differing,
    count,
    row_stride,
    word_stride,
    code_stride,
    WIDE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < count - base
    at = (base % WIDE).to(tl.int32) + offset  # 32-bit division: that of a 64-bit number takes longer than the load
    row, place = base // WIDE + at // WIDE, at % WIDE
    address = base + offset if IS_PACKED else row * row_stride + place * word_stride
    seen = tl.load(rows + address, mask=inside, other=0)
    expected = tl.load(codes + row * code_stride, mask=inside, other=0) ^ tl.load(mask + place, mask=inside, other=0)
    differs = inside & (seen != expected.to(rows.dtype.element_ty))
    tl.store(differing + row, differs.to(tl.uint8), mask=differs)


_DIFFERING = triton.jit(_compare_block)
IS_INTERPRETED = not isinstance(_DIFFERING, triton.JITFunction)
