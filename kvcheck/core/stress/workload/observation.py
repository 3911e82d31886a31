"""Comparisons that a pass has queued on its device, and the settings of readers beside the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcheck.core.base import content
from kvcheck.core.base.paging import IndexArray

INDEX_READERS = (("key", "scale"), ("",), ("scale", "key"))
"""The readers of a packed index page, pass by pass: one for keys and one for scales, or one for both at once."""


@dataclass(slots=True, kw_only=True)
class Observation:
    """One comparison of a pass. Reading its tensors blocks the process.

    bad: bool [n] or [n, tokens]; rows: words of the same leading shape. ids: [n] locs, or pages or slots. chunk,
    positions: [n]; if `tokens` is not 1, positions are those of the first token of each page.
    """

    site: content.Site
    bad: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    are_locs: bool
    chunk: IndexArray
    positions: IndexArray
    tokens: int
    judged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """early_send: a second lane reads a request's cached prefix beside its first pass, as an early send to a decode
    node or a draft model does. replay_every: one pass in so many is a replayed graph, whose reads make no waits; 0:
    none. one_layer: only the first layer of each space is written and read, for the reference run: the tokens are the
    same."""

    early_send: bool = False
    replay_every: int = 0
    one_layer: bool = False
