"""Decoder: the scheduler's interface to the model.

Invariants:
- A chunk writes KV for positions [start, stop) and reads positions [0, stop) as far as its layers see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.cache.transfer.metadata import MetadataRow


@dataclass(frozen=True, slots=True)
class Chunk:
    request_id: int
    holding: Holding
    start: int
    stop: int


class Decoder(Protocol):
    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        """Queue one forward pass."""

    def collect(self) -> tuple[int, ...]:
        """The sampled token after each chunk of the last pass, which has been waited for."""

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        """The metadata fields of this request's prefill; the first token is output_ids[0]."""

    def join(self, request_id: int, row: MetadataRow) -> None:
        """A transferred request enters the running batch. Not called for prompts of the same engine."""
