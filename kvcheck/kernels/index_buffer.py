"""Index pages of NSA pools, which hold all keys of a page and then all its scales: write tokens, read whole requests.

rows: [N, W] int64 words, a page a row; of page_size P tokens with K words of key and H halves (32 bits) of scale:
    words [0, P * K)          keys,   token o at [K * o, K * o + K)
    words [P * K, W)          scales, token o at halves [H * o, H * o + H) of them
A request's tokens are those of its pages in logical order, the last page cut where the request ends.

Invariants:
- Bytes are moved, never converted: an FP8 key and an fp32 scale arrive with their bits, NaN included.
- Page ids are read when the operation runs. Pages behind the end of a request are not read.
- Nothing waits for the device, because the caller passes the number of tokens.
"""

from __future__ import annotations

import torch

from kvcheck.kernels.compilers import asks_triton
from kvcheck.kernels.index_layout import IndexLayout, IndexReads


def set_index_torch(
    rows: torch.Tensor, locs: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, layout: IndexLayout
) -> None:
    """Write key and scale of tokens. locs: [n] page * P + token, no duplicates; keys: [n, K]; scales: [n, H] int32."""
    _check(rows, layout)
    pages, tokens = locs // layout.page_size, locs % layout.page_size
    _keys_of(rows, layout)[pages, tokens] = keys
    _scales_of(rows, layout)[pages, tokens] = scales


def set_index(
    rows: torch.Tensor, locs: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, layout: IndexLayout
) -> None:
    """set_index_torch in one launch."""
    if not _runs_kernel(rows):
        set_index_torch(rows, locs, keys, scales, layout)
        return
    from kvcheck.kernels.index_buffer_triton import set_index_triton

    _check(rows, layout)
    assert keys.shape == (len(locs), layout.key_words) and scales.shape == (len(locs), layout.scale_halves), (
        f"keys and scales of {len(locs)} tokens, got {[*keys.shape]} and {[*scales.shape]} for {layout}"
    )
    set_index_triton(rows, locs, keys, scales, layout)


def get_keys_torch(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> torch.Tensor:
    """Keys of all requests' tokens, one request after another: [tokens, K] int64."""
    _check(rows, layout)
    return _keys_of(rows, layout)[_places(reads, layout)]


def get_scales_torch(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> torch.Tensor:
    """Scales of all requests' tokens, one request after another: [tokens, H] int32."""
    _check(rows, layout)
    return _scales_of(rows, layout)[_places(reads, layout)]


def get_index_torch(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and scales of all requests' tokens: [tokens, K] int64, [tokens, H] int32."""
    return get_keys_torch(rows, reads, layout), get_scales_torch(rows, reads, layout)


def get_keys(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> torch.Tensor:
    """get_keys_torch in one launch."""
    if not _runs_kernel(rows):
        return get_keys_torch(rows, reads, layout)
    keys = rows.new_empty((reads.tokens, layout.key_words))
    _get(rows, reads, layout, keys, None)
    return keys


def get_scales(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> torch.Tensor:
    """get_scales_torch in one launch."""
    if not _runs_kernel(rows):
        return get_scales_torch(rows, reads, layout)
    scales = rows.new_empty((reads.tokens, layout.scale_halves), dtype=torch.int32)
    _get(rows, reads, layout, None, scales)
    return scales


def get_index(rows: torch.Tensor, reads: IndexReads, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """get_index_torch in one launch, which looks up each page once."""
    if not _runs_kernel(rows):
        return get_index_torch(rows, reads, layout)
    keys = rows.new_empty((reads.tokens, layout.key_words))
    scales = rows.new_empty((reads.tokens, layout.scale_halves), dtype=torch.int32)
    _get(rows, reads, layout, keys, scales)
    return keys, scales


def _get(
    rows: torch.Tensor,
    reads: IndexReads,
    layout: IndexLayout,
    keys: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    from kvcheck.kernels.index_buffer_triton import get_index_triton

    _check(rows, layout)
    get_index_triton(rows, reads, layout, keys, scales)


def _runs_kernel(rows: torch.Tensor) -> bool:
    if not asks_triton(rows):
        return False
    from kvcheck.kernels import index_buffer_triton

    return rows.is_cuda or index_buffer_triton.IS_INTERPRETED


def _places(reads: IndexReads, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Page id and place in the page of every token that comes out."""
    token = torch.arange(reads.tokens, device=reads.pages.device)
    request = torch.searchsorted(reads.starts, token, right=True) - 1
    at = token - reads.starts[request]
    return reads.pages[request, at // layout.page_size].to(torch.int64), at % layout.page_size


def _keys_of(rows: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    """[N, P, K] int64, a view."""
    return rows[:, : layout.page_size * layout.key_words].view(-1, layout.page_size, layout.key_words)


def _scales_of(rows: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    """[N, P, H] int32, a view."""
    halves = rows[:, layout.page_size * layout.key_words :].view(torch.int32)
    return halves.view(-1, layout.page_size, layout.scale_halves)


def _check(rows: torch.Tensor, layout: IndexLayout) -> None:
    assert rows.dtype == torch.int64 and rows.ndim == 2 and rows.shape[1] == layout.page_words, (
        f"rows are int64 [N, {layout.page_words}] for {layout}, got {rows.dtype}{[*rows.shape]}"
    )
    assert rows.stride(1) == 1, "words of a page lie side by side"
