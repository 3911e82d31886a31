"""Content rows as Triton kernels that touch each word once; importing this module needs triton.

Invariants:
- They give the results of `fill_torch` and `verify_torch`. Each program writes its own findings and partial digests,
  and these are combined in a way that does not depend on the order of programs.
- A verdict and the word that it names come from one load. So they agree also if the memory changes meanwhile.
- Addresses are 64-bit and every load and store is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.digest_triton import mix64

BLOCK_WORDS = 4096
"""Words that one program handles, whatever the length of a row: no lane idles because rows are short or odd."""
WARPS = 8


def fill_triton(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, start: int | None) -> torch.Tensor | None:
    """fill_torch; partial digests [programs] where `start` is given: what the place of the first word adds, signed."""
    programs = triton.cdiv(rows.numel(), BLOCK_WORDS)
    parts = None if start is None else torch.empty(programs, dtype=torch.int64, device=rows.device)
    if programs:
        _launch(_FILL, (parts,), rows, codes, mask, start)
    return parts


def verify_triton(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, start: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`differing` of verify_torch, the first finding of each program, and partial digests [programs] if `start` is
    given.

    found: [programs, 3], the number of the first word that differs, the word, its tag. If a program found none, the
    number is the largest of its type, and the rest has no meaning.
    """
    programs = triton.cdiv(rows.numel(), BLOCK_WORDS)
    differing = torch.zeros(len(rows), dtype=torch.uint8, device=rows.device)
    found = torch.empty((programs, 3), dtype=torch.int64, device=rows.device)
    parts = None if start is None else torch.empty(programs, dtype=torch.int64, device=rows.device)
    if programs:
        _launch(_VERIFY, (differing, found, parts), rows, codes, mask, start)
    return differing.view(torch.bool), found, parts


def _launch(  # type: ignore[no-untyped-def]
    kernel,
    results: tuple[torch.Tensor | None, ...],
    rows: torch.Tensor,
    codes: torch.Tensor,
    mask: torch.Tensor,
    start: int | None,
) -> None:
    kernel[(triton.cdiv(rows.numel(), BLOCK_WORDS),)](
        rows,
        codes,
        mask.contiguous(),
        *results,
        start or 0,
        rows.numel(),
        *rows.stride(),
        codes.stride(0),
        WIDE=rows.shape[1],
        IS_PACKED=rows.is_contiguous(),
        HAS_DIGEST=start is not None,
        BLOCK=BLOCK_WORDS,
        num_warps=WARPS,
        enable_fp_fusion=False,  # no floats here; a release that changes the default warns whoever does not say
    )


def _place(count, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Number, row and place in it of every word of this program's block, and which of them exist.
    base = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    place = (base % WIDE).to(tl.int32) + offset  # 32-bit division: that of a 64-bit number takes longer than the load
    return base + offset, base // WIDE + place // WIDE, place % WIDE, offset < count - base


_PLACE = triton.jit(_place)


def _unmix64(values):  # type: ignore[no-untyped-def]
    values = (values ^ ((values >> 31) & 0x1FFFFFFFF) ^ ((values >> 62) & 3)) * 0x319642B2D24D8EC3
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF) ^ ((values >> 54) & 0x3FF)) * -0x6921E4E8C0EE6F77
    return values ^ ((values >> 30) & 0x3FFFFFFFF) ^ ((values >> 60) & 0xF)


_UNMIX64 = triton.jit(_unmix64)


def _digest_of(words, at, inside, start):  # type: ignore[no-untyped-def]
    folded = mix64(words + mix64(at * -0x61C8864680B583EB + start))
    return tl.sum(tl.where(inside, folded, 0), axis=0)


_DIGEST_OF = triton.jit(_digest_of)


def _fill_block(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    rows,
    codes,
    mask,
    parts,
    start,
    count,
    row_stride,
    word_stride,
    code_stride,
    WIDE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, row, place, inside = _PLACE(count, WIDE, BLOCK)
    words = tl.load(codes + row * code_stride, mask=inside, other=0) ^ tl.load(mask + place, mask=inside, other=0)
    address = at if IS_PACKED else row * row_stride + place * word_stride
    tl.store(rows + address, words.to(rows.dtype.element_ty), mask=inside)
    if HAS_DIGEST:
        tl.store(parts + tl.program_id(0), _DIGEST_OF(words, at, inside, start))


def _verify_block(  # type: ignore[no-untyped-def]
    rows,
    codes,
    mask,
    differing,
    found,
    parts,
    start,
    count,
    row_stride,
    word_stride,
    code_stride,
    WIDE: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_DIGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, row, place, inside = _PLACE(count, WIDE, BLOCK)
    address = at if IS_PACKED else row * row_stride + place * word_stride
    seen = tl.load(rows + address, mask=inside, other=0)
    masks = tl.load(mask + place, mask=inside, other=0)
    expected = tl.load(codes + row * code_stride, mask=inside, other=0) ^ masks
    differs = inside & (seen != expected.to(rows.dtype.element_ty))
    tl.store(differing + row, differs.to(tl.uint8), mask=differs)
    finding = found + tl.program_id(0) * 3
    if tl.sum(differs.to(tl.int32), axis=0) > 0:
        first = tl.min(tl.where(differs, at, 0x7FFFFFFFFFFFFFFF), axis=0)
        is_first = differs & (at == first)
        tl.store(finding, first)
        tl.store(finding + 1, tl.sum(tl.where(is_first, seen, 0).to(tl.int64), axis=0))
        # Halves do not name their owner. What is stored for them here is not used.
        tl.store(finding + 2, _UNMIX64(tl.sum(tl.where(is_first, seen ^ masks, 0), axis=0)))
    else:
        tl.store(finding, 0x7FFFFFFFFFFFFFFF)
    if HAS_DIGEST:
        tl.store(parts + tl.program_id(0), _DIGEST_OF(seen, at, inside, start))


_FILL = triton.jit(_fill_block)
_VERIFY = triton.jit(_verify_block)
IS_INTERPRETED = not isinstance(_FILL, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
