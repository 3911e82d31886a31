"""Target: the Protocol of an implementation under test, with its declared capabilities. It judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.movement import Movement
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.hicache.storage import PageStore
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.scheduler.process_group import RankGroup
from kvcheck.core.cache.scheduler.request import Request, SchedulerConfig, StepReport
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.layout import EndLayout
from kvcheck.core.cache.transfer.loopback_wire import Copies, Fault, Tamper, no_fault, once, unchanged
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataField
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver
from kvcheck.core.cache.transfer.seal import Sealer
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.cache.transfer.writer import Writer

FirstWords = Mapping[tuple[str, str], int]
"""By space and buffer: the first word of this rank's row in the model's whole row; 0 if left out."""


@dataclass(frozen=True, slots=True)
class SpaceCount:
    """Accounting of one space: free + held by requests + cached must be total."""

    space: str
    free: int
    cached: int
    total: int


class RoomInspector(Protocol):
    """Compares the memory of a failed room with the words of its sources."""

    def inspect(
        self,
        room: InboundRoom,
        pool: KVPool,
        metadata: MetadataBuffers,
        layout: EndLayout,
        peers: Sequence[EndLayout],
    ) -> None: ...

    def look_back(self, room: InboundRoom, pool: KVPool, metadata: MetadataBuffers, layout: EndLayout) -> None:
        """Report words in a failed room's memory that no source had to write."""


class TierInspector(Protocol):
    def computed(self, request: int, chain: tuple[bytes, ...]) -> None: ...

    def inspect(self, host: HostPool, space: str, chain: tuple[bytes, ...], units: IndexArray, *, tier: str) -> None:
        """Compare the words of these host pages or slots. tier: "host" (a backup) or "storage"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """units: usable host pages or slots of each space. rank: among the engines of its model that share the store.
    has_neighbours: engines of other models and ranks keep pages of the same prompts there."""

    units: Mapping[str, int]
    layout: str = "layer-first"
    method: str = "kernel"
    write_policy: str = "write-through"
    order: str = "lru"
    ack_period: int = 1
    ring: int = 3
    store: PageStore | None = None
    rank: int = 0
    ranks: int = 1
    has_neighbours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSetup:
    """paths: leg -> row of PATHS. refuses, vanishes: writes that the engine refuses, and those it reports and loses.
    tamper: changes messages, as a peer with other lengths would. patience: rounds that a room may take."""

    prefill_ranks: int
    decode_ranks: int
    prefill_sizes: PoolSizes
    paths: Mapping[str, str]
    room_of: Callable[[int], int]
    refuses: Fault = no_fault
    vanishes: Fault = no_fault
    tamper: Tamper = unchanged
    copies: Copies = once
    aux_over_messages: bool = False
    patience: int = 400


@dataclass(frozen=True, slots=True)
class Standing:
    """name: the request's id, or a unique number or text."""

    subject: str
    state: str
    name: int | str


class Engine(Protocol):
    @property
    def is_idle(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: int) -> bool:
        """End a request in any state; False if it is not in progress any more."""

    def standings(self) -> tuple[Standing, ...]:
        """The state of each subject, between two rounds, in an order that depends on the schedule alone."""

    def make_happen(self, happening: str, standing: Standing) -> bool:
        """Make a row of SITUATIONS come true. Return False, with nothing changed, if that is impossible."""

    def step(self) -> StepReport: ...

    def counts(self) -> tuple[SpaceCount, ...]:
        """Accounting of every space; valid after close too."""

    def evictions(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """host: None for the device tier alone. inspector, room_inspector: called after the decoder was made. pair: two
    ends with pools of their own, and metadata_slots at each; None: one engine does both, without slots."""

    shape: ModelShape
    sizes: PoolSizes
    config: SchedulerConfig
    metadata_slots: int
    share_prefixes: bool = True
    backend: Backend
    emit: Emit
    decoder: Callable[[KVPool, tuple[MetadataField, ...], FirstWords], Decoder]
    pair: PairSetup | None = None
    host: HostTier | None = None
    inspector: Callable[[], TierInspector] | None = None
    room_inspector: Callable[[], RoomInspector] | None = None


class Target(Protocol):
    name: str
    capabilities: frozenset[str]

    def build(self, setup: Setup) -> Engine: ...


def turn_ids(allocators: Iterable[IdAllocator], *, by: int) -> None:
    """Make equally built pools allocate different ids, so that an id of another pool is a wrong one."""
    for place, each in enumerate(allocators):
        each.turn(by + 2 * place)


def digest(holding: Holding) -> bytes:
    return holding.pages.tobytes() + b"|" + holding.window_pages.tobytes()


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
