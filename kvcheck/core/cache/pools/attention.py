"""AttentionInputs: the arguments of a pass's attention kernels. Layers, masks and footprints share them."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcheck.core.cache.pools.shape import ModelShape


class Held(Protocol):
    """A holding of a pool. A resumed request has a new one."""

    request: int


# positions of a request   0 ......... first_seen ......... start ....... stop
# full layers read         [0 ........................................ length)
# window layers read                   [first_seen ................... length)
# rotary embedding                                          [position ...
class AttentionInputs:
    def __init__(self, shape: ModelShape) -> None:
        self._window = shape.window

    def position(self, holding: Held, start: int) -> int:
        """Rotary position of a chunk's start: its row's, also after a resume. (mutant: resume-shifts-positions)"""
        return start

    def length(self, start: int, stop: int) -> int:
        """KV length of a chunk [start, stop): all tokens before it, and its own. (mutant: length-without-own-token)"""
        return stop

    def first_seen(self, position: int) -> int:
        """The first position that window layers see from `position`, itself one of the window's tokens.
        (mutant: window-one-short)"""
        return max(0, position + 1 - self._window)

    def ranked(self, length: int) -> int:
        """Tokens, of `length`, whose index keys the NSA indexer ranks: all. (mutant: index-skips-open-page)"""
        return length

    def picked(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Top-k positions that the tokens of one request read, [T, count]. scores: [T, n], of an indexer. (mutant:
        picks-of-other-request)"""
        return scores.topk(min(count, scores.shape[1]), -1).indices

    def times(self, holding: Held) -> int:
        """Number of updates of the recurrent state with a chunk's first token. (mutant: resume-takes-token-twice)"""
        return 1

    def scaled(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantise 8-bit rows. rows: [n, heads, dim]; scales: [n, heads, 1]. (mutant: scale-applied-twice)"""
        return rows * scales
