"""Watching: what the builtin engine's parts do, told to an EventSink from outside the parts.

Invariants:
- Parts contain no reporting; what is told is compared here, from their arguments and results.
- Nothing here changes what a part does.
"""

from __future__ import annotations

import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import SpaceCopy, full_pages
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow
from kvcheck.core.targets.target import EventSink, TierInspector, digest


class Observer:
    """Passes events on; looks at metadata slots when they are handed out, and at host pages when they have arrived."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.metadata: dict[str, MetadataBuffers] = {}
        self.host: HostPool | None = None
        self.inspector: TierInspector | None = None
        self.looked_up = sink.looked_up
        self.tier_changed = sink.tier_changed
        self.evicted = sink.evicted
        self._moving: dict[int, bytes] = {}

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        self._sink.allocated(space, ids, owner)
        if (end := self.metadata.get(space)) is not None:
            slot = int(ids[0])
            self._sink.leased(
                request=owner, space=space, slot=slot, row=end.row_view(slot).detach().cpu(), fields=end.fields
            )

    def freed(self, space: str, ids: IndexArray) -> None:
        self._sink.freed(space, ids)

    def fetched(self, *, request: int, legs: tuple[SpaceCopy, ...]) -> None:
        if self.host is not None and self.inspector is not None:
            for leg in legs:
                self.inspector.inspect(self.host, leg.space, leg.chain, leg.host, tier="storage")
        pages = full_pages(legs)
        self._sink.transferred(kind="prefetch", request=request, pages=pages, frozen=True)

    def moving(self, *, number: int, legs: tuple[SpaceCopy, ...]) -> None:
        self._moving[number] = _index_values(legs)

    def computed(self, *, request: int, chain: tuple[bytes, ...]) -> None:
        if self.inspector is not None:
            self.inspector.computed(request, chain)

    def transferred(self, *, number: int, kind: str, request: int, legs: tuple[SpaceCopy, ...]) -> None:
        if kind == "backup" and self.host is not None and self.inspector is not None:
            for leg in legs:
                self.inspector.inspect(self.host, leg.space, leg.chain, leg.host, tier="host")
        pages = full_pages(legs)
        frozen = self._moving.pop(number, None) == _index_values(legs)
        self._sink.transferred(kind=kind, request=request, pages=pages, frozen=frozen)


class PaddingCheck:
    """Looks at what no request owns: padding units must be as they were made, and maps empty when all is idle."""

    def __init__(self, pool: KVPool, sink: EventSink) -> None:
        self._pool = pool
        self._sink = sink
        self._made = {(space, buffer.name): self._padding(space, buffer) for space, buffer in pool.buffers()}

    def look(self) -> None:
        """Report; call when idle, before the memory is given back."""
        for space, buffer in self._pool.buffers():
            self._report_padding(space, buffer)
        if self._pool.has_window:
            entries = self._pool.tables["full_to_window"].read_view()[0].cpu()
            held = torch.nonzero(entries).view(-1)
            pairs = zip(held.tolist(), entries[held].tolist(), strict=True)
            self._sink.mapped(table="full_to_window", entries=tuple(pairs))

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
        self._sink.padding(
            space=space,
            buffer=buffer.name,
            piece=piece.name if piece is not None else "",
            layer=self._pool.sets[space].spec.layers[layer],
            row=row,
            words=tuple(words[:64].tolist()),
        )


class WatchedOffload(Offload):
    """An Offload that reports what it saved and restored, and whether the value is owned."""

    def __init__(self, inner: Offload, sink: EventSink) -> None:
        self.pool = inner.pool
        self._inner = inner
        self._sink = sink

    def save(self, holding: Holding) -> OffloadedKV:
        """Save, then compare storages and index values."""
        before = digest(holding)
        value = self._inner.save(holding)
        request = holding.request
        self._sink.descriptor(request=request, what="offload.save", before=before, after=digest(holding))
        self._report_storage(value, holding)
        self._sink.saved(
            request=request,
            tokens=value.tokens,
            buffers=tuple(f"{kept.space}.{kept.name}" for kept in value.buffers),
            table=self._table_names(),
        )
        return value

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        """Restore, then report pages and buffers."""
        before = digest(holding)
        written = tuple(f"{kept.space}.{kept.name}" for kept in self._inner.restored_buffers(offloaded))
        signal = self._inner.restore(offloaded, holding)
        self._sink.descriptor(request=holding.request, what="offload.restore", before=before, after=digest(holding))
        self._sink.restored(
            request=holding.request,
            tokens=offloaded.tokens,
            pages=self.pool.unit_ids(holding, "full", offloaded.tokens),
            buffers=written,
            table=self._table_names(),
        )
        return signal

    def discard(self, offloaded: OffloadedKV) -> None:
        """Pass on."""
        self._inner.discard(offloaded)

    def _table_names(self) -> tuple[str, ...]:
        return tuple(f"{space}.{buffer.name}" for space, buffer in self.pool.buffers())

    def _report_storage(self, value: OffloadedKV, holding: Holding) -> None:
        for kept in value.buffers:
            first, last = self.pool.sets[kept.space].storage_ranges()[kept.name]
            if kept.words.numel() and first <= kept.words.untyped_storage().data_ptr() < last:
                pages = self.pool.unit_ids(holding, kept.space, value.tokens)
                self._sink.aliased(
                    request=holding.request,
                    what="offloaded KV",
                    buffer=kept.name,
                    page=int(pages[0]) if len(pages) else None,
                )
            else:
                self._sink.owned("offloaded KV")


class WatchedDecoder:
    """A Decoder that looks at metadata rows when requests join."""

    def __init__(self, inner: Decoder, end: MetadataBuffers, sink: EventSink) -> None:
        self._inner = inner
        self._end = end
        self._sink = sink
        self.forward = inner.forward
        self.collect = inner.collect
        self.metadata = inner.metadata

    def join(self, request: int, row: MetadataRow) -> None:
        """Compare storages, then pass on."""
        first, last = self._end.storage_range()
        address = row.packed.data_ptr()
        if first <= address < last:
            slot = (address - first) // self._end.row_bytes
            self._sink.aliased(request=request, what="metadata row", buffer=self._end.space, page=slot)
        else:
            self._sink.owned("metadata row")
        self._inner.join(request, row)


def _index_values(legs: tuple[SpaceCopy, ...]) -> bytes:
    """The index values of a transfer, as bytes to compare."""
    return b"|".join(leg.space.encode() + b":" + leg.host.tobytes() + b"," + leg.device.tobytes() for leg in legs)
