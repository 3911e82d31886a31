"""Offload: saves a retracted request as one typed value, for every pool family, and restores it.

Invariants:
- A value holds every buffer of the pool's table; `restore` checks that before it writes.
- A value has memory of its own. (mutant: offload-value-aliases-pool)
- Only rows of the request are read; a restore writes no page that the prefix tree owns.
- The pool's pages are pinned until the save or restore that touches them is reached. Earlier frees raise FreeInFlight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Place, Signal
from kvcheck.core.cache.events import Allocated, Emit, Freed
from kvcheck.core.cache.pools.allocator import Use
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.pool import Extent, Holding, KVPool
from kvcheck.kernels.page_copy import gather_rows, scatter_rows

VALUES = "host.offload"
"""The space of offloaded values in footprints; ids are their numbers."""

CHUNK_ROWS = 8192
"""Rows copied by one chunk; the order of the chunks of a copy is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBuffer:
    """One buffer's rows: words [L, n, W], in logical order. memory: the backend's name for it, "" if not owned."""

    space: str
    name: str
    words: torch.Tensor
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedKV:
    request: int
    tokens: int  # committed length
    window_start: int  # first live logical window page
    shape_name: str
    page_size: int  # of the source pool
    layout: tuple[SpaceSpec, ...]  # of the source pool
    buffers: tuple[OffloadedBuffer, ...]
    saved: Signal  # reached once every row has been copied
    number: int  # identifies the value to its Offload and in footprints


@dataclass(slots=True, kw_only=True)
class _Kept:
    copies: list[Signal]
    uses: list[tuple[str, Use]] = field(default_factory=list)


class Offload:
    def __init__(self, pool: KVPool, backend: Backend, *, emit: Emit | None = None) -> None:
        self.pool = pool
        self._backend = backend
        self._d2h = backend.lane("d2h")
        self._h2d = backend.lane("h2d")
        self._count = 0
        self._kept: dict[int, _Kept] = {}
        self._emit = emit

    def save(self, holding: Holding) -> OffloadedKV:
        """Copy all rows of a request to pinned host memory, after all work queued on the forward lane."""
        tokens = holding.committed
        self._check_saved(holding, tokens)
        window_start = self._window_start(holding)  # may raise, so it comes before any report or allocation
        extent = self.pool.extent(holding, tokens)
        number = self._next_number()
        if self._emit is not None:
            self._emit(Allocated(VALUES, (number,), holding.request))
        behind = self._mark_forward()
        value = OffloadedKV(
            request=holding.request,
            tokens=tokens,
            window_start=window_start,
            shape_name=self.pool.shape.name,
            page_size=self.pool.page_size,
            layout=self.pool.specs,
            buffers=(),
            saved=self._backend.signal(),
            number=number,
        )
        buffers: list[OffloadedBuffer] = []
        for space, buffer in self._table():
            rows = self._saved_rows(extent, space, buffer)
            source = self.pool.sets[space].read_view(buffer.name, range(self._layers(space)), self._d2h)
            memory = f"offload.{number}.{space}.{buffer.name}"
            target = self._backend.empty(
                memory, (source.shape[0], len(rows), source.shape[2]), torch.int64, Place.PINNED
            )
            chunks = tuple(partial(gather_rows, target[:, a:b], source, index) for a, b, index in self._chunks(rows))
            self._backend.submit(
                Operation("offload.save", chunks, holding.request),
                lane=self._d2h,
                reads=(self._footprint(extent, space, buffer),),
                writes=(self._value_footprint(value, space, buffer.name),),
                after=(behind,),
            )
            buffers.append(OffloadedBuffer(space=space, name=buffer.name, words=target, memory=memory))
        self._backend.record(value.saved, lane=self._d2h)
        self._kept[number] = _Kept(copies=[value.saved])
        self._hold(self._kept[number], extent, value.saved)
        return replace(value, buffers=tuple(buffers))

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        """Copy a saved request into its new holding. Readers wait for the signal; the caller commits the tokens."""
        extent = self._checked(offloaded, holding)
        behind = self._mark_forward()
        for kept in self.restored_buffers(offloaded):
            buffer = self.pool.sets[kept.space].buffer(kept.name)
            rows = self._restored_rows(extent, kept.space, buffer)
            target = self.pool.sets[kept.space].write_view(kept.name)
            chunks = tuple(
                partial(scatter_rows, target, kept.words[:, a:b], index) for a, b, index in self._chunks(rows)
            )
            whole = buffer.rows is Granularity.PAGE  # a page row is written to its end, beyond the last token
            self._backend.submit(
                Operation("offload.restore", chunks, holding.request),
                lane=self._h2d,
                reads=(self._value_footprint(offloaded, kept.space, kept.name),),
                writes=(self._footprint(extent, kept.space, buffer, whole=whole),),
                after=(offloaded.saved, behind),
            )
        done = self._backend.signal()
        self._backend.record(done, lane=self._h2d)
        if (kept_value := self._kept.get(offloaded.number)) is not None:
            kept_value.copies.append(done)
            self._hold(kept_value, extent, done)
        return done

    def discard(self, offloaded: OffloadedKV) -> None:
        """Free the host memory of a value. Raise FreeInFlight unless all its copies are known to be done. (mutant:
        value-dropped-before-restored)"""
        if offloaded.number not in self._kept:
            raise DoubleFree(f"value {offloaded.number} of request {offloaded.request} is not kept here (any more)")
        kept_value = self._kept[offloaded.number]
        if not all(self._backend.query(each) for each in kept_value.copies):
            raise FreeInFlight(
                f"value {offloaded.number} of request {offloaded.request} was discarded while a copy of it is pending"
            )
        del self._kept[offloaded.number]
        for space, use in kept_value.uses:
            self.pool.allocators[space].drop(use)
        for kept in offloaded.buffers:
            self._backend.release(kept.memory)
        if self._emit is not None:
            self._emit(Freed(VALUES, (offloaded.number,)))

    def _table(self) -> tuple[tuple[str, BufferSpec], ...]:
        """Every buffer of the pool, so index_k_with_scale too: SGLang saved the latent rows alone (#23346). (mutant:
        offload-skips-index-buffer)"""
        return self.pool.buffers()

    def restored_buffers(self, offloaded: OffloadedKV) -> tuple[OffloadedBuffer, ...]:
        """The buffers of a value that a restore writes: all. (mutant: restore-skips-index-buffer)"""
        return offloaded.buffers

    def _saved_rows(self, extent: Extent, space: str, buffer: BufferSpec) -> IndexArray:
        """The request's own rows. (mutant: offload-saves-wrong-pages)"""
        return extent.rows(space, buffer)

    def _restored_rows(self, extent: Extent, space: str, buffer: BufferSpec) -> IndexArray:
        return extent.rows(space, buffer)

    def _window_start(self, holding: Holding) -> int:
        """Logical window pages that are gone. Only leading ones may be, since a count cannot express others."""
        gone = np.flatnonzero(holding.window_pages == 0)
        if len(gone) and int(gone[-1]) >= len(gone):
            raise LengthMismatch(
                f"request {holding.request}: expected window pages to be gone from the front only, "
                f"got {holding.window_pages.tolist()}"
            )
        return len(gone)

    def _next_number(self) -> int:
        """An unused number, as several pools may share a backend."""
        self._count += 1
        taken = {name.split(".")[1] for name in self._backend.allocated() if name.startswith("offload.")}
        while str(self._count) in taken:
            self._count += 1
        return self._count

    def _hold(self, kept: _Kept, extent: Extent, done: Signal) -> None:
        for space, ids in extent.units.items():
            kept.uses.append((space, self.pool.allocators[space].hold(ids, partial(self._backend.query, done))))

    def _check_saved(self, holding: Holding, tokens: int) -> None:
        self.pool.check_open(holding)
        pages = [len(holding.pages), *([len(holding.window_pages)] if self.pool.has_window else [])]
        if not 0 <= tokens <= min(pages) * self.pool.page_size:
            raise LengthMismatch(
                f"save of request {holding.request}: expected 0 to {min(pages) * self.pool.page_size} committed "
                f"tokens in {min(pages)} pages, got {tokens}"
            )

    def _owned_extent(self, offloaded: OffloadedKV, holding: Holding) -> Extent:
        """Raise ForeignAccess unless the value is kept and every row belongs to its request."""
        extent = self.pool.extent(holding, offloaded.tokens)
        if any(kept.memory for kept in offloaded.buffers) and offloaded.number not in self._kept:
            raise ForeignAccess(
                f"restore of request {offloaded.request}: value {offloaded.number} was discarded, or saved elsewhere"
            )
        if holding.request != offloaded.request or holding.shared:
            raise ForeignAccess(
                f"restore of request {offloaded.request}: expected a holding of its own without shared pages, "
                f"got one of request {holding.request} with {holding.shared}"
            )
        for space, ids in extent.units.items():
            self.pool.allocators[space].check_owned(ids, offloaded.request)
        return extent

    def _checked(self, offloaded: OffloadedKV, holding: Holding) -> Extent:
        expected = [(space, buffer.name) for space, buffer in self._table()]
        got = [(kept.space, kept.name) for kept in offloaded.buffers]
        if got != expected or offloaded.shape_name != self.pool.shape.name:
            raise LayoutMismatch(
                f"restore of request {offloaded.request}: expected the buffers {expected} of {self.pool.shape.name}, "
                f"got {got} of {offloaded.shape_name}"
            )
        if offloaded.layout != self.pool.specs or offloaded.page_size != self.pool.page_size:
            raise LayoutMismatch(
                f"restore of request {offloaded.request}: expected pages of {self.pool.page_size} and "
                f"{_describe(self.pool.specs)}, got pages of {offloaded.page_size} and {_describe(offloaded.layout)}"
            )
        if len(holding.pages) * self.pool.page_size < offloaded.tokens:
            raise LengthMismatch(
                f"restore of request {offloaded.request}: {offloaded.tokens} tokens do not fit "
                f"{len(holding.pages)} pages of {self.pool.page_size}"
            )
        if self._window_start(holding) != offloaded.window_start:
            raise LengthMismatch(
                f"restore of request {offloaded.request}: its window was live from page {offloaded.window_start}, "
                f"that of the new holding is from page {self._window_start(holding)}"
            )
        extent = self._owned_extent(offloaded, holding)
        for kept in offloaded.buffers:
            rows = extent.rows(kept.space, self.pool.sets[kept.space].buffer(kept.name))
            if len(rows) != kept.words.shape[1]:
                raise LengthMismatch(
                    f"restore {kept.space}.{kept.name} of request {offloaded.request}: "
                    f"{kept.words.shape[1]} saved rows for {len(rows)} rows of the new holding"
                )
        return extent

    def _chunks(self, rows: IndexArray) -> Iterator[tuple[int, int, torch.Tensor]]:
        for start in range(0, len(rows), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(rows))
            yield start, stop, self._backend.index(rows[start:stop])

    def _layers(self, space: str) -> int:
        return len(self.pool.sets[space].spec.layers)

    def _footprint(self, extent: Extent, space: str, buffer: BufferSpec, *, whole: bool = False) -> Footprint:
        """Its units; of the last page only the tokens, unless `whole`. (mutant: offload-declares-one-page-less)"""
        units, tokens = extent.units[space], extent.tokens
        spans = None
        if not whole and buffer.rows is not Granularity.SLOT and len(units):
            size = self.pool.page_size
            spans = np.tile(np.array([0, size]), (len(units), 1))
            spans[-1, 1] = tokens - (pages_for(tokens, size) - 1) * size
        owners = np.full(len(units), extent.request, dtype=np.int64)
        return Footprint(space, (buffer.name,), (0, self._layers(space)), units, spans, owners)

    def _value_footprint(self, value: OffloadedKV, space: str, buffer: str) -> Footprint:
        return Footprint(
            VALUES,
            (f"{space}.{buffer}",),
            (0, self._layers(space)),
            np.array([value.number]),
            owners=np.array([value.request]),
            place=Place.PINNED,
        )

    def _mark_forward(self) -> Signal:
        behind = self._backend.signal()
        self._backend.record(behind, lane=self.pool.forward)
        return behind


def _describe(layout: tuple[SpaceSpec, ...]) -> str:
    return ", ".join(
        f"{spec.name}.{buffer.name} of {len(spec.layers)} layers, {list(buffer.item_shape)} {buffer.dtype}"
        for spec in layout
        for buffer in spec.buffers
    )
