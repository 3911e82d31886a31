"""What a forward pass touches: pages, slots and table entries, down to the tokens inside a page.

Invariants:
- Computed once a pass; the layers of a space share the arrays, so an onlooker may compare them by identity.
- Pages are named with the span of tokens that is really read or written: an append beside a backup is no overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcheck.core.backend.backend import Footprint
from kvcheck.core.paging import IndexArray, pages_for
from kvcheck.core.pools.buffers import BufferSpec
from kvcheck.core.pools.pool import KVPool
from kvcheck.core.scheduler.decoder import Chunk


@dataclass(frozen=True, slots=True)
class Units:
    """Pages or slots of a space, with their spans and the request each is touched for."""

    rows: IndexArray
    spans: IndexArray | None
    owners: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceTouch:
    """What a pass reads and writes in one space, and the table entries through which it finds that."""

    space: str
    read: Units
    written: Units
    read_tables: tuple[Footprint, ...]
    written_tables: tuple[Footprint, ...]

    def reads(self, buffers: Sequence[BufferSpec], layer: int) -> tuple[Footprint, ...]:
        """Of an operation that reads these buffers in one layer."""
        return (self._footprint(self.read, buffers, layer), *self.read_tables)

    def writes(self, buffers: Sequence[BufferSpec], layer: int) -> tuple[Footprint, ...]:
        """Of an operation that writes these buffers in one layer; it reads `written_tables`."""
        return (self._footprint(self.written, buffers, layer),)

    def _footprint(self, units: Units, buffers: Sequence[BufferSpec], layer: int) -> Footprint:
        names = tuple(buffer.name for buffer in buffers)
        return Footprint(self.space, names, (layer, layer + 1), units.rows, units.spans, units.owners)


def pass_touches(chunks: Sequence[Chunk], pool: KVPool) -> Mapping[str, SpaceTouch]:
    """What a pass over these chunks touches, by space."""
    return {
        spec.name: _state(chunks, pool) if spec.name == "state" else _paged(chunks, pool, spec.name)
        for spec in pool.specs
    }


def _state(chunks: Sequence[Chunk], pool: KVPool) -> SpaceTouch:
    slots = np.array([chunk.holding.state_slot for chunk in chunks])
    units = Units(slots, None, np.array([chunk.request for chunk in chunks]))
    rows = np.array([chunk.holding.row for chunk in chunks])
    tables = (pool.tables["req_to_state"].footprint(np.zeros_like(rows), rows, rows + 1),)
    return SpaceTouch(space="state", read=units, written=units, read_tables=tables, written_tables=tables)


def _paged(chunks: Sequence[Chunk], pool: KVPool, space: str) -> SpaceTouch:
    starts = np.array([chunk.start for chunk in chunks])
    stops = np.array([chunk.stop for chunk in chunks])
    seen = np.zeros_like(starts) if space == "full" else np.maximum(0, starts + 1 - pool.shape.window)
    read, read_tables = _span(chunks, pool, space, seen, stops)
    written, written_tables = _span(chunks, pool, space, starts, stops)
    return SpaceTouch(space=space, read=read, written=written, read_tables=read_tables, written_tables=written_tables)


def _span(
    chunks: Sequence[Chunk], pool: KVPool, space: str, starts: IndexArray, stops: IndexArray
) -> tuple[Units, tuple[Footprint, ...]]:
    """The pages that hold the tokens [starts[i], stops[i]) of each chunk, and the entries that lead there.

    page     |---------------|---------------|---------------|
    tokens            [start ................. stop)
    spans             [o .. P)[0 ........... P)[0 .. o)
    """
    size = pool.page_size
    pages, which, numbers = [], [], []
    for index, (chunk, start, stop) in enumerate(zip(chunks, starts.tolist(), stops.tolist(), strict=True)):
        mine = chunk.holding.window_pages if space == "window" else chunk.holding.pages
        mine = mine[start // size : pages_for(stop, size)]
        pages.append(mine)
        which.append(np.full(len(mine), index))
        numbers.append(np.arange(start // size, start // size + len(mine)))
    units, of_chunk, number = np.concatenate(pages), np.concatenate(which), np.concatenate(numbers)
    spans = np.stack(
        (np.maximum(starts[of_chunk] - number * size, 0), np.minimum(stops[of_chunk] - number * size, size)), axis=1
    )
    owners = np.array([chunk.request for chunk in chunks])[of_chunk]
    rows = np.array([chunk.holding.row for chunk in chunks])
    tables: tuple[Footprint, ...] = (pool.tables["req_to_token"].footprint(rows, starts, stops),)
    if space == "window":
        full = np.concatenate(
            [
                chunk.holding.pages[start // size : pages_for(stop, size)]
                for chunk, start, stop in zip(chunks, starts.tolist(), stops.tolist(), strict=True)
            ]
        )
        tables = (*tables, pool.tables["full_to_window"].footprint(np.zeros_like(full), full, full + 1))
    return Units(units, spans, owners), tables
