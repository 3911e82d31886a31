"""Observation: a comparison that a pass has queued on its device and that is not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcheck.core.base import content
from kvcheck.core.base.paging import IndexArray


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
