"""Sparse attention of a decode step: score index keys, pick the best tokens, attend to their rows alone.

Invariants:
- top_k is exact and has one result: of equal scores the earlier token is better, and positions are ascending.
- index_scores is exact, and all forms give the same bits, if products of keys, queries, weights and scales are whole
  multiples of one power of two and their sums stay below 2**24 of it. Otherwise a score is off by at most (D + H + 4) *
  2**-22 * scale * sum over h of abs(weight[h]) * sum over d of abs(query[h, d] * key[d]): each of D + H + 4 operations
  rounds by 2**-24, or drops up to 2**-22 in a matrix unit.
- sparse_attention is off by at most (exp(2 * d) - 1 + u + (n + 4) * 2**-22) * max(abs(value)), where d is the error of
  a logit, (D + 2) * 2**-22 * scale * sum over d of abs(query * row), n counts the tokens, and u is one unit in the
  last place of a probability in the type of the rows: 2**-7 for bfloat16, 2**-10 for float16, 0 for float32.
- Nothing waits for the device, and tokens behind the end of a request are never looked up.
"""

from __future__ import annotations

import torch

from kvcheck.kernels.compilers import asks_triton
from kvcheck.kernels.index_buffer import get_index_torch
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

FIRST_WITH_E4M3 = (8, 9)
"""Compute capability from which Triton 3.6 and 3.7 compile kernels that read float8_e4m3fn."""


def index_scores_torch(
    queries: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, reads: IndexReads, layout: IndexLayout
) -> torch.Tensor:
    """scale * sum over heads of weight * max(0, query . key), of all requests' tokens one after another: [tokens] fp32.

    queries: [B, H, D] float8_e4m3fn; weights: [B, H] fp32; rows: index pages, FP8 keys of D bytes, one fp32 scale each.
    """
    _check_scores(queries, weights, reads, layout)
    keys, scales = get_index_torch(rows, reads, layout)
    values = keys.view(torch.float8_e4m3fn).to(torch.float32)
    request = _requests(reads.starts, reads.tokens)
    asked, total = queries.to(torch.float32), torch.zeros_like(values[:, 0])
    for head in range(queries.shape[1]):  # all heads at once would take as many times the memory of the keys
        found = (asked[:, head].index_select(0, request) * values).sum(-1)
        total += weights[:, head].index_select(0, request) * found.clamp_min(0)
    return total * scales.view(torch.float32).view(-1)


def index_scores(
    queries: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, reads: IndexReads, layout: IndexLayout
) -> torch.Tensor:
    """index_scores_torch straight from the pages, each read once for all heads."""
    if not _runs_kernel(queries):
        return index_scores_torch(queries, weights, rows, reads, layout)
    from kvcheck.kernels.attention_triton import index_scores_triton

    _check_scores(queries, weights, reads, layout)
    return index_scores_triton(queries, weights, rows, reads, layout)


def top_k_torch(scores: torch.Tensor, starts: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of each request's k best tokens, ascending, -1 behind them where it has fewer: [B, k] int64.

    scores: [tokens] fp32 numbers, one request after another; starts: [B + 1] int64. 0.0 and -0.0 are equal.
    """
    count = len(scores)
    token = torch.arange(count, device=scores.device)
    request = _requests(starts, count)
    order = (scores + 0.0).sort(descending=True, stable=True).indices
    order = order[request[order].sort(stable=True).indices]
    is_best = torch.zeros_like(request, dtype=torch.bool)
    is_best[order] = token - starts[request] < k
    # Number of the best tokens before each token, first in all requests and then in its own.
    before = torch.cat((starts.new_zeros(1), is_best.cumsum(0)))
    column = before[:-1] - before[starts[request]]
    best = torch.full((len(starts) - 1, k + 1), -1, dtype=torch.int64, device=scores.device)
    best[request, torch.where(is_best, column, k)] = torch.where(is_best, token - starts[request], -1)
    return best[:, :k].contiguous()


def top_k(scores: torch.Tensor, starts: torch.Tensor, k: int) -> torch.Tensor:
    """top_k_torch by one program a request, which finds the k-th best score digit by digit."""
    assert scores.dtype == torch.float32 and scores.ndim == 1 and k > 0, f"fp32 scores, got {scores.dtype}, k = {k}"
    if not _runs_kernel(scores):
        return top_k_torch(scores, starts, k)
    from kvcheck.kernels.attention_triton import top_k_triton

    return top_k_triton(scores, starts, k)


def sparse_attention_torch(
    queries: torch.Tensor, rows: torch.Tensor, locs: torch.Tensor, *, value_dim: int, scale: float
) -> torch.Tensor:
    """softmax(scale * query . row) over a request's tokens, times the first `value_dim` elements of their rows.

    queries: [B, H, D], rows: [R, D], one floating type; locs: [B, k] rows of the tokens, -1 for none. Returns
    [B, H, value_dim] fp32; a request without tokens gets zeros.
    """
    _check_attention(queries, rows, locs, value_dim)
    is_token = (locs >= 0).unsqueeze(1)
    seen = rows[locs.clamp_min(0)].to(torch.float32) * is_token.transpose(1, 2)
    logits = torch.matmul(queries.to(torch.float32), seen.transpose(1, 2)) * scale
    chances = logits.masked_fill(~is_token, float("-inf")).softmax(-1).masked_fill(~is_token, 0.0)
    return torch.matmul(chances, seen[..., :value_dim])


def sparse_attention(
    queries: torch.Tensor, rows: torch.Tensor, locs: torch.Tensor, *, value_dim: int, scale: float
) -> torch.Tensor:
    """sparse_attention_torch in one pass over the rows of the tokens."""
    if not _runs_kernel(rows):
        return sparse_attention_torch(queries, rows, locs, value_dim=value_dim, scale=scale)
    from kvcheck.kernels.attention_triton import sparse_attention_triton

    _check_attention(queries, rows, locs, value_dim)
    return sparse_attention_triton(queries, rows, locs, value_dim, scale)


def _runs_kernel(memory: torch.Tensor) -> bool:
    if not asks_triton(memory):
        return False
    from kvcheck.kernels import attention_triton

    if memory.is_cuda:
        return multiplies_on(memory.dtype, torch.cuda.get_device_capability(memory.device))
    return attention_triton.IS_INTERPRETED


def multiplies_on(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether kernels for a device of that compute capability can read the type."""
    return dtype is not torch.float8_e4m3fn or capability >= FIRST_WITH_E4M3


def _requests(starts: torch.Tensor, count: int) -> torch.Tensor:
    """The request of each of `count` tokens."""
    token = torch.arange(count, device=starts.device)
    return torch.searchsorted(starts, token, right=True) - 1


def _check_scores(queries: torch.Tensor, weights: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> None:
    requests, heads, dim = queries.shape
    assert queries.dtype == torch.float8_e4m3fn and weights.dtype == torch.float32, "FP8 queries, fp32 weights"
    assert weights.shape == (requests, heads) and len(reads.pages) == requests, "weights and pages for each query"
    assert (layout.key_words * 8, layout.scale_halves) == (dim, 1), (
        f"keys of {dim} FP8 and one fp32 scale, got {layout}"
    )


def _check_attention(queries: torch.Tensor, rows: torch.Tensor, locs: torch.Tensor, value_dim: int) -> None:
    assert queries.dtype == rows.dtype and rows.dtype.is_floating_point, f"got {queries.dtype} and {rows.dtype}"
    assert queries.ndim == 3 and rows.ndim == 2 and locs.ndim == 2, "queries are [B, H, D], rows [R, D], locs [B, k]"
    assert queries.shape[2] == rows.shape[1] >= value_dim > 0 and len(locs) == len(queries), (
        f"got queries {[*queries.shape]}, rows {[*rows.shape]}, locs {[*locs.shape]}, values of {value_dim}"
    )
