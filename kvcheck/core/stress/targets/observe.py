"""Observers of the builtin engine: they make events from arguments and results of its parts, and change nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import SpaceCopy, full_pages
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.scheduler.request import SchedulerConfig, StepReport
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataField, MetadataRow
from kvcheck.core.cache.transfer.receiver import InboundRoom
from kvcheck.core.stress.targets.prefixes import CachedPrefixes
from kvcheck.core.stress.targets.target import TierInspector, digest
from kvcheck.core.stress.workload.events import (
    Aliased,
    Allocated,
    Descriptor,
    Emit,
    Freed,
    GaveUp,
    Leased,
    Mapped,
    Owned,
    Padding,
    Restored,
    RoomChanged,
    RoomMarked,
    Saved,
    SealsFitted,
    Verified,
)
from kvcheck.core.stress.workload.report_events import Reported, Sized
from kvcheck.core.stress.workload.tier_events import (
    Chosen,
    Computed,
    Evicted,
    Flushed,
    Locked,
    LookedUp,
    Moving,
    Refused,
    RoomWanted,
    Stored,
    StoreQueried,
    TierChanged,
    Transferred,
)


class Observer:
    """Passes events on; inspects metadata slots at allocation, and host pages at arrival."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.metadata: dict[str, MetadataBuffers] = {}
        self.host: HostPool | None = None
        self.inspector: TierInspector | None = None
        self.prefixes: CachedPrefixes | None = None
        self._moving: dict[int, bytes] = {}

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        self._emit(Allocated(space, tuple(ids.tolist()), owner))
        if (end := self.metadata.get(space)) is not None:
            slot = int(ids[0])
            self._emit(Leased(owner, space, slot, _residue(end.row_view(slot).detach().cpu(), end.fields)))

    def freed(self, space: str, ids: IndexArray) -> None:
        self._emit(Freed(space, tuple(ids.tolist())))

    def fetched(self, *, request: int, copies: tuple[SpaceCopy, ...]) -> None:
        if self.host is not None and self.inspector is not None:
            for copy in copies:
                self.inspector.inspect(self.host, copy.space, copy.chain, copy.host, tier="storage")
        moved = full_pages(copies)
        self._emit(Transferred("prefetch", request, len(moved), frozen=True, chain=moved))

    def looked_up(
        self, *, request: int, chain: tuple[bytes, ...], pages: int, device_pages: int, device_only: bool, priority: int
    ) -> None:
        self._emit(LookedUp(request, chain, pages, device_pages, device_only, priority))
        if self.prefixes is not None and not device_only:
            self.prefixes.looked_up(chain, pages)

    def asked(self, *, request: int, chain: tuple[bytes, ...], is_fetching: bool) -> None:
        self._emit(StoreQueried(request, chain, is_fetching))

    def locked(self, *, tier: str, end: bytes, added: bool) -> None:
        self._emit(Locked(tier, end, added))

    def wanted(self, *, tier: str, space: str, units: int) -> None:
        self._emit(RoomWanted(tier, space, units))

    def chosen(self, *, tier: str, space: str, chain: tuple[bytes, ...], passed: tuple[bytes, ...]) -> None:
        self._emit(Chosen(tier, space, chain, passed))

    def flushed(self, *, tiers: tuple[str, ...], chain: tuple[bytes, ...]) -> None:
        self._emit(Flushed(tiers, chain))

    def refused(self, *, kind: str, request: int, space: str, chain: tuple[bytes, ...]) -> None:
        self._emit(Refused(kind, request, space, chain))

    def stored(self, *, space: str, chain: tuple[bytes, ...], keys: tuple[str, ...], is_whole: bool) -> None:
        self._emit(Stored(space, chain, is_whole, keys))

    def tier_changed(self, *, tier: str, space: str, chain: tuple[bytes, ...], ids: IndexArray, added: bool) -> None:
        self._emit(TierChanged(tier, space, chain, tuple(ids.tolist()), added))
        if self.prefixes is not None and space == "full" and not added:
            self.prefixes.leaving(chain)

    def evicted(self, *, tier: str, space: str, during_load: bool) -> None:
        self._emit(Evicted(tier, space, during_load))
        if self.prefixes is not None:
            self.prefixes.evicted(tier)

    def moving(self, *, number: int, kind: str, copies: tuple[SpaceCopy, ...]) -> None:
        self._emit(Moving(number, kind, tuple((copy.space, tuple(copy.host.tolist())) for copy in copies)))
        self._moving[number] = _index_values(copies)

    def computed(self, *, request: int, chain: tuple[bytes, ...], priority: int) -> None:
        self._emit(Computed(request, chain, priority))
        if self.inspector is not None:
            self.inspector.computed(request, chain)

    def transferred(self, *, number: int, kind: str, request: int, copies: tuple[SpaceCopy, ...]) -> None:
        if kind == "backup" and self.host is not None and self.inspector is not None:
            for copy in copies:
                self.inspector.inspect(self.host, copy.space, copy.chain, copy.host, tier="host")
        frozen = self._moving.pop(number, None) == _index_values(copies)
        moved = full_pages(copies)
        self._emit(Transferred(kind, request, len(moved), frozen, moved, number))


class RoomObserver:
    """look: inspects a room whose seal never fitted. look_back: a failed room once its writers have stopped."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.look: Callable[[InboundRoom], None] | None = None
        self.look_back: Callable[[InboundRoom], None] | None = None

    def room(self, *, rank: str, room: int, request: int, generation: int, old: int, new: int, reason: str) -> None:
        self._emit(RoomChanged(rank, room, request, generation, old, new, reason))

    def gave_up(self, *, rank: str, request: int, reason: str) -> None:
        self._emit(GaveUp(rank, request, reason))

    def sealed(self, *, rank: str, request: int, size: int) -> None:
        self._emit(Verified("sealed", size // 8, request))
        self._emit(SealsFitted(rank, request, size))

    def marked(self, *, rank: str, word: int) -> None:
        self._emit(RoomMarked(rank, word))

    def unsealed(self, *, rank: str, room: InboundRoom) -> None:
        if self.look is not None:
            self.look(room)

    def drained(self, *, rank: str, room: InboundRoom) -> None:
        if self.look_back is not None and room.holding.is_open:
            self.look_back(room)


class PaddingCheck:
    def __init__(self, pool: KVPool, emit: Emit) -> None:
        self._pool = pool
        self._emit = emit
        self._made = {(space, buffer.name): self._padding(space, buffer) for space, buffer in pool.buffers()}

    def look(self) -> None:
        """To be called when idle, before the memory is freed."""
        for space, buffer in self._pool.buffers():
            self._report_padding(space, buffer)
        if self._pool.has_window:
            entries = self._pool.tables["full_to_window"].read_view()[0].cpu()
            held = torch.nonzero(entries).view(-1)
            pairs = zip(held.tolist(), entries[held].tolist(), strict=True)
            self._emit(Mapped("full_to_window", tuple(pairs)))

    def _padding(self, space: str, buffer: BufferSpec) -> torch.Tensor:
        """A copy of page or slot 0, [L, rows, W]."""
        rows = self._pool.page_size if buffer.rows is Granularity.TOKEN else 1
        layers = range(len(self._pool.sets[space].spec.layers))
        return self._pool.sets[space].read_view(buffer.name, layers, self._pool.forward)[:, :rows].cpu().clone()

    def _report_padding(self, space: str, buffer: BufferSpec) -> None:
        seen, made = self._padding(space, buffer), self._made[space, buffer.name]
        layer, row, at, words = 0, 0, 0, torch.zeros(0, dtype=torch.int64)
        if not torch.equal(seen, made):
            layer, row, at = torch.nonzero(seen != made)[0].tolist()
            words = seen[layer, row]
        piece = next((p for p in reversed(buffer.pieces) if p.offset <= at * 8), None)
        self._emit(
            Padding(
                space=space,
                buffer=buffer.name,
                piece=piece.name if piece is not None else "",
                layer=self._pool.sets[space].spec.layers[layer],
                row=row,
                words=tuple(words[:64].tolist()),
            )
        )


class WatchedOffload(Offload):
    """An Offload that reports saves and restores, and whether the value is owned."""

    def __init__(self, inner: Offload, emit: Emit) -> None:
        self.pool = inner.pool
        self._inner = inner
        self._emit = emit

    def save(self, holding: Holding) -> OffloadedKV:
        before = digest(holding)
        value = self._inner.save(holding)
        request = holding.request
        self._emit(Descriptor(request, "offload.save", unchanged=before == digest(holding)))
        self._report_storage(value, holding)
        buffers = tuple(f"{kept.space}.{kept.name}" for kept in value.buffers)
        self._emit(Saved(request, value.tokens, buffers, self._table_names()))
        return value

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        before = digest(holding)
        written = tuple(f"{kept.space}.{kept.name}" for kept in self._inner.restored_buffers(offloaded))
        signal = self._inner.restore(offloaded, holding)
        self._emit(Descriptor(holding.request, "offload.restore", unchanged=before == digest(holding)))
        pages = tuple(self.pool.extent(holding, offloaded.tokens).units["full"].tolist())
        self._emit(Restored(holding.request, offloaded.tokens, pages, written, self._table_names()))
        return signal

    def discard(self, offloaded: OffloadedKV) -> None:
        self._inner.discard(offloaded)

    def _table_names(self) -> tuple[str, ...]:
        return tuple(f"{space}.{buffer.name}" for space, buffer in self.pool.buffers())

    def _report_storage(self, value: OffloadedKV, holding: Holding) -> None:
        units = self.pool.extent(holding, value.tokens).units
        for kept in value.buffers:
            first, last = self.pool.sets[kept.space].storage_ranges()[kept.name]
            if kept.words.numel() and first <= kept.words.untyped_storage().data_ptr() < last:
                pages = units[kept.space]
                page = int(pages[0]) if len(pages) else None
                self._emit(Aliased(holding.request, "offloaded KV", kept.name, page))
            else:
                self._emit(Owned("offloaded KV"))


class WatchedDecoder:
    def __init__(self, inner: Decoder, end: MetadataBuffers, emit: Emit) -> None:
        self._inner = inner
        self._end = end
        self._emit = emit
        self.forward = inner.forward
        self.collect = inner.collect
        self.metadata = inner.metadata

    def join(self, request_id: int, row: MetadataRow) -> None:
        first, last = self._end.storage_range()
        address = row.packed.data_ptr()
        if first <= address < last:
            slot = (address - first) // self._end.row_bytes
            self._emit(Aliased(request_id, "metadata row", self._end.space, slot))
        else:
            self._emit(Owned("metadata row"))
        self._inner.join(request_id, row)


def reported(end: str, report: StepReport) -> Reported:
    return Reported(
        end=end,
        admitted=tuple(report.admitted),
        joined=tuple(report.joined),
        retracted=tuple(report.retracted),
        resumed=tuple(report.resumed),
        finished=tuple(request for request, _ in report.finished),
        failed=tuple(request for request, _ in report.failed),
    )


def sized(process: str, pool: KVPool, config: SchedulerConfig, *others: IdAllocator) -> Sized:
    """The sizes of a process. others: allocators beside those of the pool."""
    return Sized(
        process=process,
        page_size=pool.page_size,
        max_prefilling=config.max_prefilling,
        units=tuple((each.space, each.count) for each in (*pool.allocators.values(), *others)),
    )


def _residue(row: torch.Tensor, fields: tuple[MetadataField, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """row: packed metadata, [row_bytes]."""
    if not bool(row.any()):
        return ()
    residue = []
    for field in fields:
        part = row[field.offset : field.offset + field.size_bytes]
        if bool(part.any()):
            words = part[: len(part) // 8 * 8].contiguous().view(torch.int64)[:64]
            residue.append((field.name, tuple(int(word) for word in words)))
    return tuple(residue)


def _index_values(copies: tuple[SpaceCopy, ...]) -> bytes:
    return b"|".join(copy.space.encode() + b":" + copy.host.tobytes() + b"," + copy.device.tobytes() for copy in copies)
