"""PairEngine: a prefill end and a decode end of several ranks each, joined in one process by the loopback wire.

Invariants:
- Each rank has a pool, metadata, lanes and allocators of its own, and is a host of its own: what one rank waits for,
  another has not waited for.
- Ranks of one end see one another through agreed values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcheck.core.backend.scoped import ScopedBackend, scoped
from kvcheck.core.errors import InternalError
from kvcheck.core.paging import IndexArray
from kvcheck.core.pools import POOLS
from kvcheck.core.pools.pool import KVPool, PoolSizes
from kvcheck.core.pools.shape import ModelShape
from kvcheck.core.pools.sharding import rank_shape, shard_range
from kvcheck.core.scheduler.agreement import RankGroup
from kvcheck.core.scheduler.decode import ANOTHER_RANK, DecodeScheduler
from kvcheck.core.scheduler.parts import EngineParts
from kvcheck.core.scheduler.prefill import PrefillScheduler
from kvcheck.core.scheduler.request import Generation, StepReport
from kvcheck.core.targets.parts import Parts
from kvcheck.core.targets.target import EventSink, FirstWords, Setup, SpaceCount
from kvcheck.core.targets.watching import Bystander, Watch, WatchedDecoder, WatchedOffload
from kvcheck.core.transfer.layout import EndLayout, end_layout, routes
from kvcheck.core.transfer.loopback_wire import LoopbackFabric, LoopbackWire
from kvcheck.core.transfer.metadata import MetadataBuffers, MetadataField
from kvcheck.core.transfer.writer import part_name


class ScopedSink:
    """An EventSink for one rank: ids are told under the rank's own names of spaces."""

    def __init__(self, sink: EventSink, scope: str) -> None:
        self._sink = sink
        self._scope = scope
        self.saved, self.restored, self.aliased, self.owned = sink.saved, sink.restored, sink.aliased, sink.owned
        self.descriptor, self.looked_up, self.tier_changed = sink.descriptor, sink.looked_up, sink.tier_changed
        self.transferred, self.evicted, self.padding = sink.transferred, sink.evicted, sink.padding
        self.mapped, self.acting, self.decided = sink.mapped, sink.acting, sink.decided
        self.room, self.sealed = sink.room, sink.sealed

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        """Under the rank's name."""
        self._sink.allocated(scoped(self._scope, space), ids, owner)

    def freed(self, space: str, ids: IndexArray) -> None:
        """Under the rank's name."""
        self._sink.freed(scoped(self._scope, space), ids)

    def leased(
        self, *, request: int, space: str, slot: int, row: torch.Tensor, fields: tuple[MetadataField, ...]
    ) -> None:
        """Under the rank's name."""
        self._sink.leased(request=request, space=scoped(self._scope, space), slot=slot, row=row, fields=fields)


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank, before and after it knows its peers."""

    name: str
    backend: ScopedBackend
    sink: ScopedSink
    pool: KVPool
    metadata: MetadataBuffers
    layout: EndLayout
    wire: LoopbackWire
    bystander: Bystander
    first_words: FirstWords


class RankScheduler(Protocol):
    """A rank of either end."""

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do."""

    def poll(self) -> list[int]:
        """What this rank knows."""

    def settle(self, agreed: Sequence[int]) -> StepReport:
        """One round, with what all ranks agreed on."""

    def close(self) -> None:
        """Give everything back."""


class PairEngine:
    """The Engine over both ends. Requests finish on the decode end."""

    def __init__(self, parts: Parts, setup: Setup) -> None:
        if setup.pair is None:
            raise InternalError("a pair engine needs a pair setup")
        self._sink = setup.sink
        self._backend = setup.backend
        self._setup = setup
        self._pair = setup.pair
        self._round = 0
        self._group: RankGroup = parts.group()
        fabric = LoopbackFabric(paths=self._pair.paths, refuses=self._pair.refuses, tamper=self._pair.tamper)
        self._prefill_ranks = [
            self._rank(parts, "prefill", rank, self._pair.prefill_ranks, self._pair.prefill_sizes, fabric)
            for rank in range(self._pair.prefill_ranks)
        ]
        self._decode_ranks = [
            self._rank(parts, "decode", rank, self._pair.decode_ranks, setup.sizes, fabric)
            for rank in range(self._pair.decode_ranks)
        ]
        self._split_rows()
        self.prefill = [self._prefill_end(parts, rank) for rank in self._prefill_ranks]
        self.decode = [self._decode_end(parts, rank) for rank in self._decode_ranks]
        self._sink.acting("")
        self._backend.drain()

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do on any rank."""
        return all(each.is_idle for each in self._schedulers)

    def submit(self, generation: Generation) -> None:
        """Queue a request at both ends."""
        for prefill in self.prefill:
            prefill.submit(generation)
        for decode in self.decode:
            decode.submit(generation)

    def abort(self, request: int) -> bool:
        """End a request where its user's router can: even ones at both ends, odd ones at the decode end alone.

        A decode end that has not asked for a prompt yet cannot tell anybody, so then the prefill end is told as well.
        """
        is_asked = all(each.is_asked(request) for each in self.decode)
        found = False
        if request % 2 == 0 or not is_asked:
            for rank, prefill in zip(self._prefill_ranks, self.prefill, strict=True):
                self._sink.acting(rank.name)
                found = prefill.abort(request) or found
        if request % 2 or not is_asked or not found:
            for rank, decode in zip(self._decode_ranks, self.decode, strict=True):
                self._sink.acting(rank.name)
                found = decode.abort(request) or found
        return found

    def step(self) -> StepReport:
        """One round of every rank, prefill first."""
        self._round += 1
        before = self._step_end("prefill", self._prefill_ranks, self.prefill)
        report = self._step_end("decode", self._decode_ranks, self.decode)
        self._sink.acting("")
        # A round in which nobody computed anything: time passes until the next one.
        if not (before.admitted or before.joined or report.admitted or report.joined or report.finished):
            self._backend.idle()
        return report

    def counts(self) -> tuple[SpaceCount, ...]:
        """Accounting of every rank."""
        rows = []
        for rank in (*self._prefill_ranks, *self._decode_ranks):
            rows += [
                SpaceCount(scoped(rank.name, name), each.available, 0, each.count)
                for name, each in rank.pool.allocators.items()
            ]
            slots = rank.metadata.slots
            rows.append(SpaceCount(scoped(rank.name, rank.metadata.space), slots.available, 0, slots.count))
        return tuple(rows)

    def evictions(self) -> int:
        """No prefix is cached."""
        return 0

    def close(self) -> None:
        """Look at what nobody may have touched, then give everything back."""
        self._sink.acting("")
        self._backend.drain()
        for rank in (*self._prefill_ranks, *self._decode_ranks):
            rank.bystander.look()
        for scheduler in self._schedulers:
            scheduler.close()

    @property
    def _schedulers(self) -> tuple[RankScheduler, ...]:
        return (*self.prefill, *self.decode)

    def _step_end(self, end: str, ranks: Sequence[Rank], schedulers: Sequence[RankScheduler]) -> StepReport:
        known = []
        for rank, scheduler in zip(ranks, schedulers, strict=True):
            self._sink.acting(rank.name)
            known.append(scheduler.poll())
        reports = []
        for rank, scheduler, agreed in zip(ranks, schedulers, self._group.agree(known), strict=True):
            self._sink.acting(rank.name)
            reports.append(scheduler.settle(agreed))
        self._sink.decided(end=end, decisions=tuple(_decision(report) for report in reports))
        reports[0].failed = _reasons(reports)
        return reports[0]

    # Assembly

    def _rank(self, parts: Parts, end: str, number: int, ranks: int, sizes: PoolSizes, fabric: LoopbackFabric) -> Rank:
        name = f"{end}-{number}"
        backend = ScopedBackend(self._setup.backend, name)
        sink = ScopedSink(self._sink, name)
        watch = Watch(sink)
        self._sink.acting(name)
        whole = self._setup.shape
        pool = parts.pool(rank_shape(whole, number, ranks), sizes, backend=backend, listener=watch)
        metadata = parts.metadata(
            end,
            slots=self._setup.metadata_slots,
            hidden_size=whole.hidden_size,
            backend=backend,
            lane=backend.lane("forward"),
            listener=watch,
            align=self._pair.slot_align if end == "decode" else 8,
        )
        watch.metadata = {metadata.space: metadata}
        return Rank(
            name=name,
            backend=backend,
            sink=sink,
            pool=pool,
            metadata=metadata,
            layout=end_layout(pool, metadata, whole=whole, rank=number, ranks=ranks),
            wire=fabric.end(backend),
            bystander=Bystander(pool, sink),
            first_words=first_words(whole, pool, number, ranks),
        )

    def _split_rows(self) -> None:
        """Where several source ranks write one row, each has a part of its own in every footprint of that buffer."""
        sources, targets = self._pair.prefill_ranks, self._pair.decode_ranks
        pairs = routes(self._decode_ranks[0].layout, sources=sources, targets=targets)
        for rank in self._decode_ranks:
            mine = [(source, slices) for (source, target), slices in pairs.items() if target == rank.layout.rank]
            count = len(mine)
            rank.backend.split = {
                key: tuple(part_name(key[1], source, count) for source, slices in mine if key in slices)
                for key in ((each.space, each.name) for each in rank.layout.buffers)
            }

    def _prefill_end(self, parts: Parts, rank: Rank) -> PrefillScheduler:
        self._sink.acting(rank.name)
        sender = parts.sender(
            rank.pool,
            rank.metadata,
            rank.wire,
            rank.backend,
            layout=rank.layout,
            peers=[each.layout for each in self._decode_ranks],
            sealer=parts.sealer,
            aux_over_messages=self._pair.aux_over_messages,
        )
        decoder = self._setup.decoder(rank.pool, rank.metadata.fields, rank.first_words)
        return PrefillScheduler(
            rank.pool,
            rank.metadata,
            decoder,
            sender,
            rank.backend,
            self._setup.config,
            room_of=self._pair.room_of,
        )

    def _decode_end(self, parts: Parts, rank: Rank) -> DecodeScheduler:
        self._sink.acting(rank.name)
        receiver = parts.receiver(
            rank.pool,
            rank.metadata,
            rank.wire,
            rank.backend,
            layout=rank.layout,
            peers=[each.layout for each in self._prefill_ranks],
            clock=lambda: self._round,
            patience=self._pair.patience,
            sealer=parts.sealer,
            listener=rank.sink,
        )
        decoder = self._setup.decoder(rank.pool, rank.metadata.fields, rank.first_words)
        sink = rank.sink
        engine_parts = EngineParts(
            backend=rank.backend,
            pool=rank.pool,
            offload=WatchedOffload(parts.offload(rank.pool, rank.backend), sink),
            cache=None,
            prefill_metadata=None,
            decode_metadata=rank.metadata,
            transport=None,
            decoder=WatchedDecoder(decoder, rank.metadata, sink),
        )
        return parts.decode_scheduler(engine_parts, self._setup.config, receiver=receiver, room_of=self._pair.room_of)


def first_words(whole: ModelShape, pool: KVPool, rank: int, ranks: int) -> FirstWords:
    """By buffer, the word of the whole row with which a rank's row begins."""
    found = {}
    totals = {(spec.name, each.name): each.shards for spec in POOLS.load(whole.family)(whole) for each in spec.buffers}
    for space, buffer in pool.buffers():
        first = shard_range(totals[space, buffer.name], rank, ranks).start
        found[space, buffer.name] = first * (buffer.row_bytes // buffer.shards // 8)
    return found


def _reasons(reports: Sequence[StepReport]) -> list[tuple[int, str]]:
    """What failed, with the reason of a rank that saw it fail; the others only know that some rank did."""
    reasons = dict(reports[0].failed)
    for request, reason in (each for report in reports for each in report.failed):
        if reasons.get(request) == ANOTHER_RANK:
            reasons[request] = reason
    return list(reasons.items())


def _decision(report: StepReport) -> tuple[int, ...]:
    """What a round decided, as numbers; reasons may differ, requests may not."""
    finished = [value for request, tokens in report.finished for value in (request, *tokens)]
    groups = (report.admitted, report.joined, report.retracted, report.resumed, finished)
    failed = [request for request, _ in report.failed]
    return tuple(value for group in (*groups, failed) for value in (len(group), *group))
