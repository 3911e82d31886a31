"""SchedulerDeps: the parts of a scheduler, without those of a transfer, which not every engine has."""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.transfer.metadata import MetadataBuffers


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
    """Allocate a metadata slot and a holding for `tokens` tokens, or neither: None. query: as in KVPool.grow."""
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
