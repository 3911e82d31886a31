"""Decoder: the scheduler's interface to the model.

Invariants:
- A chunk writes KV for positions [start, stop) and reads positions [0, stop) as far as its layers see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerDeps:
    """cache: None without prefix sharing."""

    backend: Backend
    pool: KVPool
    offload: Offload
    cache: HiCache | None
    decoder: Decoder


def take_slot_and_row(
    metadata: MetadataBuffers, pool: KVPool, request_id: int, *, tokens: int = 0, query: int = 0
) -> tuple[int, Holding] | None:
    """Allocate a metadata slot and a holding with room for `tokens` tokens, or nothing and return None. query: as in
    KVPool.grow."""
    slot = metadata.lease(request_id)
    if slot is None:
        return None
    holding = pool.open(request_id)
    if holding is not None and pool.grow(holding, tokens, query=query):
        return slot, holding
    if holding is not None:
        pool.close(holding)
    metadata.release(slot, request_id)
    return None


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
        """The request enters the running batch, with its transferred metadata. Not called for prompts of the same
        engine."""
