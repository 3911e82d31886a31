"""digest_torch as one Triton kernel that reads each word once. Programs write partial sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 1024


def partial_digests_triton(words: torch.Tensor, start: int) -> torch.Tensor:
    """Partial digests [programs] of `words` [n]; start: the signed term of the first place."""
    assert words.dtype == torch.int64 and words.ndim == 1, f"words are int64 [n], got {words.dtype}{[*words.shape]}"
    programs = triton.cdiv(len(words), BLOCK_WORDS)
    parts = torch.empty(programs, dtype=torch.int64, device=words.device)
    if programs:
        _KERNEL[(programs,)](
            words,
            parts,
            start,
            len(words),
            words.stride(0),
            BLOCK=BLOCK_WORDS,
            enable_fp_fusion=False,  # no floats here; left unset, a release that changes the default would warn
        )
    return parts


def _mix64(values):  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    # Shifts of signed words are arithmetic: the mask makes them logical.
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return values ^ ((values >> 31) & 0x1FFFFFFFF)


mix64 = triton.jit(_mix64)


def _fold_block(words, parts, start, count, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    places = mix64(at * -0x61C8864680B583EB + start)
    folded = mix64(tl.load(words + at * stride, mask=inside, other=0) + places)
    tl.store(parts + program, tl.sum(tl.where(inside, folded, 0), axis=0))


_KERNEL = triton.jit(_fold_block)
IS_INTERPRETED = not isinstance(_KERNEL, triton.JITFunction)
