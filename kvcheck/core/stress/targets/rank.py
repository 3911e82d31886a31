"""One rank of a pair: its memory, its end of a wire and its scheduler, in this process or in one of its own.

Invariants:
- Its name is "<end>-<number>", on the wire and in every name that its backend makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.errors import InternalError
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.backend.scoped import ScopedBackend, scoped
from kvcheck.core.cache.events import Allocated, Emit, Event, Freed
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.pools.shape import rank_shape, shard_range
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.request import StepReport
from kvcheck.core.cache.transfer.layout import EndLayout, end_layout, routes, sources_of
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.wire import Wire
from kvcheck.core.cache.transfer.writer import part_name
from kvcheck.core.stress.targets.observe import (
    Observer,
    PaddingCheck,
    RoomObserver,
    WatchedDecoder,
    WatchedOffload,
    sized,
)
from kvcheck.core.stress.targets.target import FirstWords, PairSetup, Setup, SpaceCount, TargetParts, turn_ids
from kvcheck.core.stress.workload.events import Leased, ProcessActs

SLOT_ALIGN = {"prefill": 8, "decode": 256}
"""Alignment of metadata slots, in bytes: another one at each end."""
TURNS = {"prefill": 5, "decode": 1}
"""Makes first ids differ by end, and by rank."""


@dataclass(slots=True, kw_only=True)
class Rank:
    name: str
    backend: ScopedBackend
    emit: Emit
    pool: KVPool
    metadata: MetadataBuffers
    layout: EndLayout
    wire: Wire
    padding: PaddingCheck
    first_words: FirstWords


def scoped_emit(emit: Emit, scope: str) -> Emit:
    def renamed(event: Event) -> None:
        if isinstance(event, Allocated | Freed | Leased):
            event = replace(event, space=scoped(scope, event.space))
        emit(event)

    return renamed


def pair_of(setup: Setup) -> PairSetup:
    if setup.pair is None:
        raise InternalError("a rank of a pair needs a pair setup")
    return setup.pair


def make_rank(
    parts: TargetParts, setup: Setup, end: str, number: int, *, backend: Backend, wire: Callable[[ScopedBackend], Wire]
) -> Rank:
    pair = pair_of(setup)
    ranks, sizes = (pair.prefill_ranks, pair.prefill_sizes) if end == "prefill" else (pair.decode_ranks, setup.sizes)
    name = f"{end}-{number}"
    own = ScopedBackend(backend, name)
    emit = scoped_emit(setup.emit, name)
    observer = Observer(emit)
    setup.emit(ProcessActs(name))
    whole = setup.shape
    pool = parts.pool(
        rank_shape(whole, number, ranks),
        sizes,
        backend=own,
        emit=observer,
        buffers=parts.buffers,
        attention=parts.attention,
    )
    metadata = parts.metadata(
        end,
        slots=setup.metadata_slots,
        hidden_size=whole.hidden_size,
        backend=own,
        lane=own.lane("forward"),
        emit=observer,
        align=SLOT_ALIGN[end],
    )
    observer.metadata = {metadata.space: metadata}
    turn_ids((*pool.allocators.values(), metadata.slots), by=TURNS[end] + number)
    setup.emit(sized(name, pool, setup.config, metadata.slots))
    layout = end_layout(pool, metadata, whole=whole, rank=number, ranks=ranks)
    return Rank(
        name=name,
        backend=own,
        emit=emit,
        pool=pool,
        metadata=metadata,
        layout=layout,
        wire=wire(own),
        padding=PaddingCheck(pool, emit),
        first_words=first_words(layout),
    )


def split_rows(rank: Rank, sources: int) -> None:
    """Give each of several source ranks of one row its own part in every footprint of that buffer."""
    pairs = routes(rank.layout, sources=sources, targets=rank.layout.ranks)
    number = rank.layout.rank
    mine = [(source, pairs[source, number]) for source in sources_of(pairs, number)]
    rank.backend.split = {
        key: tuple(part_name(key[1], source, len(mine)) for source, slices in mine if key in slices)
        for key in ((each.space, each.name) for each in rank.layout.buffers)
    }


def prefill_end(
    parts: TargetParts, setup: Setup, rank: Rank, peers: Sequence[EndLayout], *, clock: Callable[[], int]
) -> PrefillScheduler:
    """peers: all decode ranks. clock: unit of the setup's patience."""
    setup.emit(ProcessActs(rank.name))
    pair = pair_of(setup)
    sender = parts.sender(
        rank.pool,
        rank.metadata,
        rank.wire,
        rank.backend,
        layout=rank.layout,
        peers=peers,
        clock=clock,
        patience=pair.patience * 3 // 2,  # the decode end can name the missing parts, so its timeout comes first
        sealer=parts.sealer,
        writer=parts.writer,
        aux_over_messages=pair.aux_over_messages,
        emit=RoomObserver(rank.emit),
    )
    decoder = setup.decoder(rank.pool, rank.metadata.fields, rank.first_words)
    return PrefillScheduler(rank.pool, rank.metadata, decoder, sender, rank.backend, setup.config, room_of=pair.room_of)


def decode_end(
    parts: TargetParts, setup: Setup, rank: Rank, peers: Sequence[EndLayout], *, clock: Callable[[], int]
) -> DecodeScheduler:
    setup.emit(ProcessActs(rank.name))
    pair = pair_of(setup)
    rooms = RoomObserver(rank.emit)
    receiver = parts.receiver(
        rank.pool,
        rank.metadata,
        rank.wire,
        rank.backend,
        layout=rank.layout,
        peers=peers,
        clock=clock,
        patience=pair.patience,
        sealer=parts.sealer,
        emit=rooms,
    )
    decoder = setup.decoder(rank.pool, rank.metadata.fields, rank.first_words)
    if setup.room_inspector is not None:
        inspector = setup.room_inspector()
        rooms.look = lambda room: inspector.inspect(room, rank.pool, rank.metadata, rank.layout, peers)
        rooms.look_back = lambda room: inspector.look_back(room, rank.pool, rank.metadata, rank.layout)
    deps = SchedulerDeps(
        backend=rank.backend,
        pool=rank.pool,
        offload=WatchedOffload(parts.offload(rank.pool, rank.backend, emit=Observer(rank.emit)), rank.emit),
        cache=None,
        decoder=WatchedDecoder(decoder, rank.metadata, rank.emit),
    )
    return parts.decode_scheduler(deps, setup.config, metadata=rank.metadata, receiver=receiver, room_of=pair.room_of)


def rank_counts(rank: Rank) -> list[SpaceCount]:
    rows = [
        SpaceCount(scoped(rank.name, name), each.available, 0, each.count)
        for name, each in rank.pool.allocators.items()
    ]
    slots = rank.metadata.slots
    return [*rows, SpaceCount(scoped(rank.name, rank.metadata.space), slots.available, 0, slots.count)]


def first_words(layout: EndLayout) -> FirstWords:
    """By buffer, the first word of a rank's row within the whole row."""
    return {
        (each.space, each.name): shard_range(each.total_shards, layout.rank, layout.ranks).start
        * (each.rows.shard_bytes // 8)
        for each in layout.buffers
    }


def decision(report: StepReport) -> tuple[int, ...]:
    """Requests must be equal on all ranks; reasons may differ."""
    finished = [value for request, tokens in report.finished for value in (request, *tokens)]
    groups = (report.admitted, report.joined, report.retracted, report.resumed, finished)
    failed = [request for request, _ in report.failed]
    return tuple(value for group in (*groups, failed) for value in (len(group), *group))
