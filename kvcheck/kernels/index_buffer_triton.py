"""Index pages written and read by Triton kernels; importing this module needs triton.

Invariants:
- They give the results of `set_index_torch` and the `get_..._torch` functions, for pages at any distance.
- Addresses are 64-bit, whatever the type of the ids, and every load and store is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.compilers import grid_of
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

BLOCK_WORDS = 1024
"""Most words of keys that one program reads: the whole page where a key has 128 bytes and a page 64 tokens."""
BLOCK_TOKENS = 32
"""Tokens that one program writes."""


def get_index_triton(
    rows: torch.Tensor,
    reads: IndexReads,
    layout: IndexLayout,
    keys: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """Read keys, scales or both into packed memory."""
    requests, columns = reads.pages.shape
    words = layout.page_size * layout.key_words
    block = min(BLOCK_WORDS, triton.next_power_of_2(words))
    # A program copies some words of one page's keys, which are contiguous on both sides. The first program also copies
    # scales.
    splits = 1 if keys is None else triton.cdiv(words, block)
    if not reads.tokens:
        return
    _GET[grid_of(columns, requests, splits)](
        rows,
        rows.view(torch.int32),
        reads.pages,
        reads.starts,
        keys,
        scales,
        rows.stride(0),
        *reads.pages.stride(),
        P=layout.page_size,
        K=layout.key_words,
        H=layout.scale_halves,
        BLOCK=block,
        HALVES=triton.next_power_of_2(layout.page_size * layout.scale_halves),
        enable_fp_fusion=False,  # no floats here; a release that changes the default warns whoever does not say
    )


def set_index_triton(
    rows: torch.Tensor, locs: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, layout: IndexLayout
) -> None:
    """set_index_torch."""
    assert keys.stride(-1) == scales.stride(-1) == 1, "words of a key, and of a scale, lie side by side"
    if not len(locs):
        return
    _SET[(triton.cdiv(len(locs), BLOCK_TOKENS),)](
        rows,
        rows.view(torch.int32),
        locs,
        keys,
        scales,
        len(locs),
        rows.stride(0),
        locs.stride(0),
        keys.stride(0),
        scales.stride(0),
        P=layout.page_size,
        K=layout.key_words,
        H=layout.scale_halves,
        K_BLOCK=triton.next_power_of_2(layout.key_words),
        H_BLOCK=triton.next_power_of_2(layout.scale_halves),
        TOKENS=BLOCK_TOKENS,
        enable_fp_fusion=False,
    )


def _get_pages(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    rows,
    halves,
    pages,
    starts,
    keys,
    scales,
    row_stride,
    request_stride,
    column_stride,
    P: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + request)
    tokens = tl.minimum(tl.load(starts + request + 1) - start - column * P, P)
    if tokens > 0:
        page = tl.load(pages + request * request_stride + column * column_stride).to(tl.int64)
        into = start + column * P
        if keys is not None:
            word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
            inside = word < tokens * K
            seen = tl.load(rows + page * row_stride + word, mask=inside, other=0)
            tl.store(keys + into * K + word, seen, mask=inside)
        if scales is not None:
            half = tl.arange(0, HALVES)
            is_scale = (half < tokens * H) & (tl.program_id(2) == 0)
            at = page * row_stride * 2 + P * K * 2 + half
            tl.store(scales + into * H + half, tl.load(halves + at, mask=is_scale, other=0), mask=is_scale)


def _set_tokens(  # type: ignore[no-untyped-def]
    rows,
    halves,
    locs,
    keys,
    scales,
    count,
    row_stride,
    loc_stride,
    key_stride,
    scale_stride,
    P: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    K_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    is_token = token < count
    loc = tl.load(locs + token * loc_stride, mask=is_token, other=0).to(tl.int64)
    page, offset = loc // P, loc % P
    word = tl.arange(0, K_BLOCK)[None, :]
    inside = is_token & (word < K)
    seen = tl.load(keys + token * key_stride + word, mask=inside, other=0)
    tl.store(rows + page * row_stride + offset * K + word, seen, mask=inside)
    half = tl.arange(0, H_BLOCK)[None, :]
    is_scale = is_token & (half < H)
    scale = tl.load(scales + token * scale_stride + half, mask=is_scale, other=0)
    tl.store(halves + page * row_stride * 2 + P * K * 2 + offset * H + half, scale, mask=is_scale)


_GET = triton.jit(_get_pages)
_SET = triton.jit(_set_tokens)
IS_INTERPRETED = not isinstance(_GET, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
