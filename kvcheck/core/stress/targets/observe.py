"""Observers of the builtin engine: they follow the events of its parts, and change nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.events import Allocated, Computed, Emit, Event, SealsFitted
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Fetched, SpaceCopy, Transfer, TransferBegan, TransferEnded, full_pages
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.scheduler.request import SchedulerConfig, StepReport
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataField, MetadataRow
from kvcheck.core.cache.transfer.receiver import InboundRoom, RoomLeft, RoomUnsealed
from kvcheck.core.stress.targets.prefixes import CachedPrefixes
from kvcheck.core.stress.targets.target import TierInspector, digest
from kvcheck.core.stress.workload.events import (
    Aliased,
    Descriptor,
    Leased,
    Mapped,
    Moving,
    Owned,
    Padding,
    Reported,
    Restored,
    Saved,
    Sized,
    Transferred,
    Verified,
)


class Observer:
    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.metadata: dict[str, MetadataBuffers] = {}
        self.host: HostPool | None = None
        self.inspector: TierInspector | None = None
        self.prefixes: CachedPrefixes | None = None
        self._moving: dict[int, bytes] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, TransferBegan):
            self._began(event.transfer)
        elif isinstance(event, TransferEnded):
            self._ended(event.transfer)
        elif isinstance(event, Fetched):
            self._inspect(event.copies, "storage")
            moved = full_pages(event.copies)
            self._emit(Transferred("prefetch", event.request, len(moved), frozen=True, chain=moved))
        else:
            self._emit(event)
            self._follow(event)

    def _follow(self, event: Event) -> None:
        if isinstance(event, Allocated):
            if (end := self.metadata.get(event.space)) is not None:
                slot = event.ids[0]
                row = end.row_view(slot).detach().cpu()
                self._emit(Leased(event.owner, event.space, slot, _residue(row, end.fields)))
        elif isinstance(event, Computed):
            if self.inspector is not None:
                self.inspector.computed(event.request, event.chain)
        elif self.prefixes is not None:
            self.prefixes.follow(event)

    def _began(self, transfer: Transfer) -> None:
        units = tuple((copy.space, tuple(copy.host.tolist())) for copy in transfer.copies)
        self._emit(Moving(transfer.number, transfer.kind, units))
        self._moving[transfer.number] = _index_values(transfer.copies)

    def _ended(self, transfer: Transfer) -> None:
        if transfer.kind == "backup":
            self._inspect(transfer.copies, "host")
        frozen = self._moving.pop(transfer.number, None) == _index_values(transfer.copies)
        moved = full_pages(transfer.copies)
        self._emit(Transferred(transfer.kind, transfer.request, len(moved), frozen, moved, transfer.number))

    def _inspect(self, copies: tuple[SpaceCopy, ...], tier: str) -> None:
        if self.host is not None and self.inspector is not None:
            for copy in copies:
                self.inspector.inspect(self.host, copy.space, copy.chain, copy.host, tier=tier)


class RoomObserver:
    """look: inspects a room whose seal never fitted. look_back: a failed room once its writers have stopped."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.look: Callable[[InboundRoom], None] | None = None
        self.look_back: Callable[[InboundRoom], None] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoomUnsealed):
            if self.look is not None:
                self.look(event.room)
        elif isinstance(event, RoomLeft):
            if self.look_back is not None and event.room.holding.is_open:
                self.look_back(event.room)
        else:
            if isinstance(event, SealsFitted):
                self._emit(Verified("sealed", event.size // 8, event.request))
            self._emit(event)


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
    def __init__(self, inner: Offload, emit: Emit) -> None:
        self.pool = inner.pool
        self._inner = inner
        self._send = emit

    def save(self, holding: Holding) -> OffloadedKV:
        before = digest(holding)
        value = self._inner.save(holding)
        request = holding.request
        self._send(Descriptor(request, "offload.save", unchanged=before == digest(holding)))
        self._report_storage(value, holding)
        buffers = tuple(f"{kept.space}.{kept.name}" for kept in value.buffers)
        self._send(Saved(request, value.tokens, buffers, self._table_names()))
        return value

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        before = digest(holding)
        written = tuple(f"{kept.space}.{kept.name}" for kept in self._inner.restored_buffers(offloaded))
        signal = self._inner.restore(offloaded, holding)
        self._send(Descriptor(holding.request, "offload.restore", unchanged=before == digest(holding)))
        pages = tuple(self.pool.extent(holding, offloaded.tokens).units["full"].tolist())
        self._send(Restored(holding.request, offloaded.tokens, pages, written, self._table_names()))
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
                self._send(Aliased(holding.request, "offloaded KV", kept.name, page))
            else:
                self._send(Owned("offloaded KV"))


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
