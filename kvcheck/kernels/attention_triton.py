"""Index scores, top-k and sparse decode attention as Triton kernels; importing this module needs triton.

Invariants:
- They mean what the torch forms mean, within the tolerance stated there; top-k exactly.
- Addresses are 64-bit and every load and store is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcheck.kernels.compilers import grid_of
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

BLOCK_SCORES = 1024
"""Scores that a program looks at together."""
BLOCK_ROWS = 32
"""Rows that a program attends to together."""
LEAST = 16
"""Fewest rows and columns that a matrix unit takes."""


def index_scores_triton(
    queries: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, reads: IndexReads, layout: IndexLayout
) -> torch.Tensor:
    """index_scores_torch."""
    (requests, columns), (_, heads, dim) = reads.pages.shape, queries.shape
    scores = torch.empty(reads.tokens, dtype=torch.float32, device=rows.device)
    if not reads.tokens:
        return scores
    _SCORES[grid_of(columns, requests)](
        queries.contiguous(),
        weights.contiguous(),
        rows.view(torch.float8_e4m3fn),
        rows.view(torch.float32),
        reads.pages,
        reads.starts,
        scores,
        rows.stride(0),
        *reads.pages.stride(),
        P=layout.page_size,
        D=dim,
        HEADS=heads,
        P_BLOCK=max(LEAST, triton.next_power_of_2(layout.page_size)),
        D_BLOCK=max(LEAST, triton.next_power_of_2(dim)),
        H_BLOCK=max(LEAST, triton.next_power_of_2(heads)),
    )
    return scores


def top_k_triton(scores: torch.Tensor, starts: torch.Tensor, k: int) -> torch.Tensor:
    """top_k_torch."""
    best = torch.full((len(starts) - 1, k), -1, dtype=torch.int64, device=scores.device)
    if len(best) and len(scores):
        _TOP_K[(len(best),)](scores, starts, best, k, BLOCK=BLOCK_SCORES)
    return best


def sparse_attention_triton(
    queries: torch.Tensor, rows: torch.Tensor, locs: torch.Tensor, value_dim: int, scale: float
) -> torch.Tensor:
    """sparse_attention_torch."""
    (requests, heads, dim), count = queries.shape, locs.shape[1]
    result = torch.empty((requests, heads, value_dim), dtype=torch.float32, device=rows.device)
    if result.numel():
        _ATTENTION[grid_of(triton.cdiv(heads, LEAST), requests)](
            queries.contiguous(),
            rows,
            locs.contiguous(),
            result,
            scale,
            *rows.stride(),
            COUNT=count,
            D=dim,
            V=value_dim,
            HEADS=heads,
            # A row is cut at the end of its values, so that 512 + 64 elements are not padded to 1024.
            V_BLOCK=max(LEAST, triton.next_power_of_2(value_dim)),
            REST=max(LEAST, triton.next_power_of_2(dim - value_dim)) if dim > value_dim else 0,
            H_BLOCK=LEAST,
            BLOCK=BLOCK_ROWS,
            # The interpreter multiplies matrices of bfloat16 as if their bits were whole numbers.
            IS_WIDE=IS_INTERPRETED and rows.dtype == torch.bfloat16,
            num_warps=8,
        )
    return result


def _score_page(  # type: ignore[no-untyped-def]  # triton reads annotations as types of its own
    queries,
    weights,
    keys,
    scales,
    pages,
    starts,
    scores,
    row_stride,
    request_stride,
    column_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    P_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
):
    # One program: the tokens of one page, for all heads.
    column = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + request)
    tokens = tl.minimum(tl.load(starts + request + 1) - start - column * P, P)
    if tokens > 0:
        page = tl.load(pages + request * request_stride + column * column_stride).to(tl.int64)
        token, dim, head = tl.arange(0, P_BLOCK), tl.arange(0, D_BLOCK), tl.arange(0, H_BLOCK)
        is_key = (token < tokens)[:, None] & (dim < D)[None, :]
        key = tl.load(keys + page * row_stride * 8 + token[:, None] * D + dim[None, :], mask=is_key, other=0.0)
        is_query = (dim < D)[:, None] & (head < HEADS)[None, :]
        place = (request * HEADS + head)[None, :] * D + dim[:, None]
        query = tl.load(queries + place, mask=is_query, other=0.0)
        # FP8 values are float16 values too; sums of their products need more than an FP8 unit keeps.
        found = tl.maximum(tl.dot(key.to(tl.float16), query.to(tl.float16)), 0.0)
        weight = tl.load(weights + request * HEADS + head, mask=head < HEADS, other=0.0)
        total = tl.sum(found * weight[None, :], axis=1)
        at = page * row_stride * 2 + P * D // 4 + token
        scale = tl.load(scales + at, mask=token < tokens, other=0.0)
        tl.store(scores + start + column * P + token, total * scale, mask=token < tokens)


def _ordered(scores, at, inside):  # type: ignore[no-untyped-def]
    # Unsigned numbers in the order of the scores. Adding zero turns -0.0 into 0.0.
    bits = (tl.load(scores + at, mask=inside, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)


_ORDERED = triton.jit(_ordered)


def _pick(scores, starts, best, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program: one request. Four rounds find the k-th best number, eight bits at a time from the top.
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    missing = tl.minimum(count, k).to(tl.int32)
    digits = tl.arange(0, 512)
    bound = tl.full((), 0, tl.uint32)  # digits found so far of the k-th best number
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((512,), tl.int32)
        base = count * 0  # the interpreter takes no loaded number as the end of a range
        while base < count:
            at = base + tl.arange(0, BLOCK)
            base += BLOCK
            number = _ORDERED(scores, start + at, at < count)
            is_open = at < count
            if step > 0:
                is_open = is_open & ((number >> (shift + 8)) == (bound >> (shift + 8)))
            digit = ((number >> shift) & 255).to(tl.int32)
            counts += tl.histogram(tl.where(is_open, digit, 256), 512)
        counts = tl.where(digits < 256, counts, 0)
        from_digit = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        found = tl.max(tl.where((from_digit >= missing) & (digits < 256), digits, 0), axis=0)
        missing -= tl.sum(tl.where((digits > found), counts, 0), axis=0)
        bound = bound | (found.to(tl.uint32) << shift)
    # `missing` now counts how many of the numbers that equal the bound belong to the best: the first ones.
    taken = tl.full((), 0, tl.int32)
    base = count * 0
    while base < count:
        at = base + tl.arange(0, BLOCK)
        base += BLOCK
        number = _ORDERED(scores, start + at, at < count)
        is_equal = (at < count) & (number == bound)
        equals = tl.cumsum(is_equal.to(tl.int32), axis=0)
        is_best = ((at < count) & (number > bound)) | (is_equal & (equals <= missing))
        column = taken + tl.cumsum(is_best.to(tl.int32), axis=0) - 1
        tl.store(best + request * k + column, at.to(tl.int64), mask=is_best)
        missing -= tl.minimum(missing, tl.sum(is_equal.to(tl.int32), axis=0))
        taken += tl.sum(is_best.to(tl.int32), axis=0)


def _attend(  # type: ignore[no-untyped-def]
    queries,
    rows,
    locs,
    result,
    scale,
    row_stride,
    element_stride,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    REST: tl.constexpr,
    H_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    # One program: some heads of one request; probabilities are scaled again whenever a larger logit comes up.
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * H_BLOCK + tl.arange(0, H_BLOCK)
    value = tl.arange(0, V_BLOCK)
    asked = queries + (request * HEADS + head)[:, None] * D
    is_value = (head < HEADS)[:, None] & (value < V)[None, :]
    kind = tl.float32 if IS_WIDE else rows.dtype.element_ty
    query = tl.load(asked + value[None, :], mask=is_value, other=0.0).to(kind)
    largest = tl.full((H_BLOCK,), -1e30, tl.float32)
    total = tl.zeros((H_BLOCK,), tl.float32)
    sums = tl.zeros((H_BLOCK, V_BLOCK), tl.float32)
    for base in range(0, COUNT, BLOCK):
        at = base + tl.arange(0, BLOCK)
        loc = tl.load(locs + request * COUNT + at, mask=at < COUNT, other=-1).to(tl.int64)
        is_token = loc >= 0
        row = rows + loc[:, None] * row_stride
        seen = tl.load(row + value[None, :] * element_stride, mask=is_token[:, None] & (value < V)[None, :], other=0.0)
        seen = seen.to(kind)
        logits = tl.dot(query, tl.trans(seen), input_precision="ieee")
        if REST > 0:
            rest = V + tl.arange(0, REST)
            is_rest = (head < HEADS)[:, None] & (rest < D)[None, :]
            key = tl.load(row + rest[None, :] * element_stride, mask=is_token[:, None] & (rest < D)[None, :], other=0.0)
            more = tl.load(asked + rest[None, :], mask=is_rest, other=0.0)
            logits += tl.dot(more.to(kind), tl.trans(key.to(kind)), input_precision="ieee")
        logits = tl.where(is_token[None, :], logits * scale, -1e30)
        larger = tl.maximum(largest, tl.max(logits, axis=1))
        chances = tl.where(is_token[None, :], tl.exp(logits - larger[:, None]), 0.0)
        shrink = tl.exp(largest - larger)
        total = total * shrink + tl.sum(chances, axis=1)
        sums = sums * shrink[:, None] + tl.dot(chances.to(kind), seen, input_precision="ieee")
        largest = larger
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    into = (request * HEADS + head)[:, None] * V + value[None, :]
    tl.store(result + into, sums, mask=is_value)


_SCORES = triton.jit(_score_page)
_TOP_K = triton.jit(_pick)
_ATTENTION = triton.jit(_attend)
IS_INTERPRETED = not isinstance(_SCORES, triton.JITFunction)
"""Whether triton was told (TRITON_INTERPRET=1) to run kernels on the CPU."""
