"""TargetParts: the classes that engines under test are made of, passed on through constructors."""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.movement import Movement
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.agreement import RankGroup
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import Receiver
from kvcheck.core.cache.transfer.seal import Sealer
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.cache.transfer.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    pool: type[KVPool] = KVPool
    buffers: type[BufferSet] = BufferSet
    attention: type[AttentionInputs] = AttentionInputs
    offload: type[Offload] = Offload
    metadata: type[MetadataBuffers] = MetadataBuffers
    scheduler: type[Scheduler] = Scheduler
    tree: type[PrefixTree] = PrefixTree
    residency: type[Residency] = Residency
    movement: type[Movement] = Movement
    controller: type[TransferController] = TransferController
    gate: type[LayerGate] = LayerGate
    cache: type[HiCache] = HiCache
    storage: type[StorageTier] = StorageTier
    sender: type[Sender] = Sender
    writer: type[Writer] = Writer
    receiver: type[Receiver] = Receiver
    sealer: type[Sealer] = Sealer
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    group: type[RankGroup] = RankGroup


FIXED = TargetParts()
