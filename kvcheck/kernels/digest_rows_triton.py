"""digest_rows_torch as one Triton kernel that reads each word once. Programs write partial sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.digest_triton import mix64

BLOCK_WORDS = 4096
"""Words that one program folds. Blocks ignore row borders, so short or odd rows leave no lane idle."""
WARPS = 8


def partial_digests_triton(source: torch.Tensor, rows: torch.Tensor, start: int) -> torch.Tensor:
    """Partial digests [programs] of rows of `source` [L, R, W]; start: the signed term of the first place."""
    count = source.shape[0] * len(rows) * source.shape[2]
    programs = triton.cdiv(count, BLOCK_WORDS)
    parts = torch.empty(programs, dtype=torch.int64, device=source.device)
    if programs:
        _KERNEL[(programs,)](
            source,
            rows,
            parts,
            start,
            count,
            len(rows),
            *source.stride(),
            rows.stride(0),
            WIDE=source.shape[2],
            BLOCK=BLOCK_WORDS,
            num_warps=WARPS,
            enable_fp_fusion=False,  # no floats here; left unset, a release that changes the default would warn
        )
    return parts


def _fold_rows(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    source,
    rows,
    parts,
    start,
    count,
    rows_count,
    layer_stride,
    row_stride,
    word_stride,
    id_stride,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    base = program * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < count - base
    # A program's first word gives the row of the list in which it begins. From there 32-bit divisions are enough;
    # 64-bit divisions take longer than the load.
    place = (base % WIDE).to(tl.int32) + offset
    row = base // WIDE
    in_list = (row % rows_count).to(tl.int32) + place // WIDE
    layer = row // rows_count + in_list // rows_count
    ids = tl.load(rows + (in_list % rows_count).to(tl.int64) * id_stride, mask=inside, other=0)
    at = layer * layer_stride + ids * row_stride + (place % WIDE).to(tl.int64) * word_stride
    words = tl.load(source + at, mask=inside, other=0)
    folded = mix64(words + mix64((base + offset) * -0x61C8864680B583EB + start))
    tl.store(parts + program, tl.sum(tl.where(inside, folded, 0), axis=0))


_KERNEL = triton.jit(_fold_rows)
IS_INTERPRETED = not isinstance(_KERNEL, triton.JITFunction)
