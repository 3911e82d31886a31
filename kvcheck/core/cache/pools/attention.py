"""AttentionInputs: what the attention of a pass is told of a request, and how it reads a stored row.

    positions of a request   0 ......... first_seen ......... start ....... stop
    full layers read         [0 ........................................ length)
    window layers read                   [first_seen ................... length)
    rotary embedding                                          [position ...

Invariants:
- Every reader of a pool asks here, so that layers, masks and footprints of a pass agree.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvcheck.core.cache.pools.shape import ModelShape


class Held(Protocol):
    """A holding of a pool. A request that resumes has another one."""

    request: int


class AttentionInputs:
    """Of one pool."""

    def __init__(self, shape: ModelShape) -> None:
        self._window = shape.window

    def position(self, holding: Held, start: int) -> int:
        """The position by which the first token of a chunk is turned: that of its row, also after a resume.

        (mutant: resume-shifts-positions)
        """
        return start

    def length(self, start: int, stop: int) -> int:
        """Tokens of the request that a chunk [start, stop) reads: all before it, and its own.

        (mutant: length-without-own-token)
        """
        return stop

    def first_seen(self, position: int) -> int:
        """The first position that window layers see from `position`, which is one of the window's tokens itself.

        (mutant: window-one-short)
        """
        return max(0, position + 1 - self._window)

    def ranked(self, length: int) -> int:
        """Of `length` tokens that are read, those whose index keys an indexer ranks: all.

        (mutant: index-skips-open-page)
        """
        return length

    def picked(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Positions that the tokens of one request read, [T, count]. scores: [T, n], of an indexer.

        (mutant: picks-of-other-request)
        """
        return scores.topk(min(count, scores.shape[1]), -1).indices

    def times(self, holding: Held) -> int:
        """How often the first token of a chunk is taken into the recurrent state.

        (mutant: resume-takes-token-twice)
        """
        return 1

    def scaled(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Values of rows that are stored in 8 bits. rows: [n, heads, dim]; scales: [n, heads, 1].

        (mutant: scale-applied-twice)
        """
        return rows * scales
