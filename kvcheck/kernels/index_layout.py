"""IndexLayout and IndexReads: where keys and scales lie in an index page of an NSA pool, and which tokens to read.

Invariants:
- The torch form and the triton form of an operation take the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLayout:
    """page_size: tokens of a page. key_words: 64-bit words of a key. scale_halves: 32-bit halves of a scale."""

    page_size: int
    key_words: int
    scale_halves: int

    def __post_init__(self) -> None:
        assert min(self.page_size, self.key_words, self.scale_halves) > 0, f"all sizes are positive, got {self}"
        assert self.page_size * self.scale_halves % 2 == 0, f"a page is whole words, got {self}"

    @property
    def page_words(self) -> int:
        """Words of a page."""
        return self.page_size * self.key_words + self.page_size * self.scale_halves // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReads:
    """Which tokens to read.

    pages: [B, M] page ids, int32 or int64. starts: [B + 1] int64, where each request's tokens begin in the result, and
    last their sum. tokens: that sum, as a Python integer. No request has more than M pages.
    """

    pages: torch.Tensor
    starts: torch.Tensor
    tokens: int

    def __post_init__(self) -> None:
        assert self.pages.ndim == 2 and self.starts.shape == (len(self.pages) + 1,), (
            f"pages are [B, M] and starts [B + 1], got {[*self.pages.shape]} and {[*self.starts.shape]}"
        )
