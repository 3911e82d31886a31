"""Footprints of a forward pass: its pages, slots and table entries, down to tokens inside a page.

Invariants:
- Layers of a space share the arrays, so observers may compare them by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcheck.core.base.content import RowSites
from kvcheck.core.base.paging import IndexArray, spans_of
from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.stress.workload.handover import PLAIN_FIELDS
from kvcheck.core.stress.workload.passes import ragged


@dataclass(frozen=True, slots=True)
class TouchedUnits:
    rows: IndexArray
    spans: IndexArray | None
    owners: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceTouch:
    space: str
    read: TouchedUnits
    written: TouchedUnits
    read_tables: tuple[Footprint, ...]
    written_tables: tuple[Footprint, ...]

    def reads(self, buffers: Sequence[BufferSpec], layer: int) -> tuple[Footprint, ...]:
        return (self._footprint(self.read, buffers, layer), *self.read_tables)

    def writes(self, buffers: Sequence[BufferSpec], layer: int) -> tuple[Footprint, ...]:
        """The operation also reads `written_tables`."""
        return (self._footprint(self.written, buffers, layer),)

    def _footprint(self, units: TouchedUnits, buffers: Sequence[BufferSpec], layer: int) -> Footprint:
        names = tuple(buffer.name for buffer in buffers)
        return Footprint(self.space, names, (layer, layer + 1), units.rows, units.spans, units.owners)


def pass_touches(chunks: Sequence[Chunk], pool: KVPool) -> Mapping[str, SpaceTouch]:
    return {
        spec.name: _state(chunks, pool) if spec.name == "state" else _paged(chunks, pool, spec.name)
        for spec in pool.specs
    }


def _state(chunks: Sequence[Chunk], pool: KVPool) -> SpaceTouch:
    slots = np.array([chunk.holding.state_slot for chunk in chunks])
    units = TouchedUnits(slots, None, np.array([chunk.request_id for chunk in chunks]))
    rows = np.array([chunk.holding.row for chunk in chunks])
    tables = (pool.tables["req_to_state"].footprint(np.zeros_like(rows), rows, rows + 1),)
    return SpaceTouch(space="state", read=units, written=units, read_tables=tables, written_tables=tables)


def _paged(chunks: Sequence[Chunk], pool: KVPool, space: str) -> SpaceTouch:
    starts = np.array([chunk.start for chunk in chunks])
    stops = np.array([chunk.stop for chunk in chunks])
    seen = np.array([0 if space == "full" else pool.attention.first_seen(chunk.start) for chunk in chunks])
    lengths = np.array([pool.attention.length(chunk.start, chunk.stop) for chunk in chunks])
    read, read_tables = _span(chunks, pool, space, seen, lengths)
    written, written_tables = _span(chunks, pool, space, starts, stops)
    return SpaceTouch(space=space, read=read, written=written, read_tables=read_tables, written_tables=written_tables)


def _span(
    chunks: Sequence[Chunk], pool: KVPool, space: str, starts: IndexArray, stops: IndexArray
) -> tuple[TouchedUnits, tuple[Footprint, ...]]:
    """The pages that hold the tokens [starts[i], stops[i]) of each chunk, and the table entries that name those pages.

    page     |---------------|---------------|---------------|
    tokens            [start ................. stop)
    spans             [o .. P)[0 ........... P)[0 .. o)
    """
    size = pool.page_size
    firsts = starts // size
    ranges = list(zip(chunks, firsts.tolist(), (-(-stops // size)).tolist(), strict=True))
    pages = [
        (chunk.holding.window_pages if space == "window" else chunk.holding.pages)[first:last]
        for chunk, first, last in ranges
    ]
    counts = np.array([len(each) for each in pages])
    of_chunk = np.repeat(np.arange(len(pages)), counts)
    page_starts = ragged(firsts, counts) * size
    spans = spans_of(np.maximum(starts[of_chunk] - page_starts, 0), np.minimum(stops[of_chunk] - page_starts, size))
    owners = np.array([chunk.request_id for chunk in chunks])[of_chunk]
    rows = np.array([chunk.holding.row for chunk in chunks])
    units = np.concatenate(pages)
    tables: tuple[Footprint, ...] = (pool.tables["req_to_token"].footprint(rows, starts, stops),)
    if space == "window":
        full = np.concatenate([chunk.holding.pages[first:last] for chunk, first, last in ranges])
        tables = (*tables, pool.tables["full_to_window"].footprint(np.zeros_like(full), full, full + 1))
    return TouchedUnits(units, spans, owners), tables


def row_sites(shape: ModelShape) -> tuple[RowSites, ...]:
    rows = [
        row
        for spec in POOLS.load(shape.family)(shape)
        for buffer in spec.buffers
        for row in _of_buffer(shape, spec, buffer)
    ]
    fields = (
        RowSites(
            space="metadata",
            buffer=f"metadata.{field.name}",
            piece=field.name,
            layers=(0,),
            words=-(-field.size_bytes // 8),
        )
        for field in metadata_fields(shape.hidden_size)
        if field.name not in PLAIN_FIELDS
    )
    return (*rows, *fields)


def _of_buffer(shape: ModelShape, spec: SpaceSpec, buffer: BufferSpec) -> list[RowSites]:
    if buffer.rows is Granularity.PAGE:
        return [
            RowSites(
                space=spec.name,
                buffer=buffer.name,
                piece=piece.name,
                layers=spec.layers,
                words=piece.size_bytes // 4 if piece.size_bytes % 8 else piece.size_bytes // 8,
                is_half=bool(piece.size_bytes % 8),
            )
            for piece in buffer.pieces
        ]
    heads = shape.ssm_heads if buffer.rows is Granularity.SLOT else shape.num_kv_heads
    return [
        RowSites(
            space=spec.name,
            buffer=buffer.name,
            piece="",
            layers=spec.layers,
            words=buffer.row_bytes // 8,
            heads=heads if heads == buffer.shards else 1,
        )
    ]
