"""PassPlan: the index tensors and expected codes of one forward pass over a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.backend.backend import Memory
from kvcheck.core.cache.pools.buffers import Piece
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some positions of every chunk, concatenated. codes: [T] expected mix64(tag). Others: as in ChunkPositions."""

    places: torch.Tensor
    codes: torch.Tensor
    chunk: IndexArray
    positions: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPositions:
    """entries: [T] flat places in the request table. chunk: [T] index of the chunk. positions: [T] logical
    positions."""

    entries: IndexArray
    chunk: IndexArray
    positions: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """pages: page starts, with codes [pages, P] and valid [pages, P]. rows: [B] request rows. state_read, state_write:
    [B] codes of the state before and after; fresh: [B] no state yet, so that the slot must be zero. numbers: [B]
    indices of these chunks in the pass. tokens: valid ones, in all pages."""

    chunks: tuple[Chunk, ...]
    write: Rows
    read: Rows
    window: Rows | None
    page_places: torch.Tensor
    page_codes: torch.Tensor
    page_valid: torch.Tensor
    page_chunk: IndexArray
    page_number: IndexArray
    rows: torch.Tensor
    state_read: torch.Tensor
    state_write: torch.Tensor
    fresh: torch.Tensor
    numbers: IndexArray
    tokens: int


def plan_pass(
    chunks: Sequence[Chunk],
    codes: Mapping[int, torch.Tensor],
    pool: KVPool,
    backend: Memory,
    *,
    numbers: Sequence[int] | None = None,
) -> PassPlan:
    """The plan is complete on the device on return. codes: request to [padded tokens] int64 in host memory, padded to
    whole pages. numbers: indices of the chunks in the pass; all by default."""
    size = pool.page_size
    mine = [codes[chunk.request_id] for chunk in chunks]
    lengths = [pool.attention.length(chunk.start, chunk.stop) for chunk in chunks]
    ranked = [pool.attention.ranked(length) for length in lengths]
    counts = [pages_for(length, size) for length in ranked]
    page_chunk = np.repeat(np.arange(len(chunks)), counts)
    page_number = ragged(np.zeros(len(chunks), dtype=np.int64), np.array(counts))
    valid = page_number[:, None] * size + np.arange(size) < np.array(ranked)[page_chunk][:, None]
    before = [
        row[max(0, chunk.start - 1) : max(0, chunk.start - 1) + 1] for row, chunk in zip(mine, chunks, strict=True)
    ]
    after = [row[chunk.stop - 1 : chunk.stop] for row, chunk in zip(mine, chunks, strict=True)]
    columns = pool.tables["req_to_token"].columns
    table_rows = np.array([chunk.holding.row for chunk in chunks], dtype=np.int64)
    starts, stops = [chunk.start for chunk in chunks], [chunk.stop for chunk in chunks]
    labels = [pool.attention.position(chunk.holding, chunk.start) for chunk in chunks]
    window = None
    if pool.has_window:
        seen = [pool.attention.first_seen(start) for start in starts]
        window = _rows(chunks, seen, lengths, mine, columns, backend)
    return PassPlan(
        chunks=tuple(chunks),
        write=_rows(chunks, starts, stops, mine, columns, backend, labels=labels),
        read=_rows(chunks, [0] * len(chunks), lengths, mine, columns, backend),
        window=window,
        page_places=backend.index(table_rows[page_chunk] * columns + page_number * size),
        page_codes=_joined([row[: n * size] for row, n in zip(mine, counts, strict=True)], backend).view(-1, size),
        page_valid=torch.from_numpy(valid).to(backend.device),
        page_chunk=page_chunk,
        page_number=page_number,
        rows=backend.index(table_rows),
        state_read=_joined(before, backend),
        state_write=_joined(after, backend),
        fresh=torch.tensor([chunk.start == 0 for chunk in chunks], device=backend.device),
        numbers=np.array(range(len(chunks)) if numbers is None else numbers, dtype=np.int64),
        tokens=sum(ranked),
    )


def places_of(chunks: Sequence[Chunk], starts: Sequence[int], stops: Sequence[int], columns: int) -> ChunkPositions:
    """The positions [starts[i], stops[i]) of each chunk. columns: of the request table."""
    counts = np.array(stops, dtype=np.int64) - np.array(starts, dtype=np.int64)
    which = np.arange(len(chunks)).repeat(counts)
    positions = ragged(np.array(starts, dtype=np.int64), counts)
    table_rows = np.array([chunk.holding.row for chunk in chunks], dtype=np.int64)
    return ChunkPositions(entries=table_rows[which] * columns + positions, chunk=which, positions=positions)


def locs_of_places(pool: KVPool, space: str, entries: torch.Tensor) -> torch.Tensor:
    """Rows of a space's token buffers, by the tables' values now."""
    locs = pool.tables["req_to_token"].read_view().view(-1).index_select(0, entries)
    if space != "window":
        return locs
    size = pool.page_size
    peers = pool.tables["full_to_window"].read_view().view(-1).index_select(0, locs // size)
    return peers * size + locs % size


def piece_of_tokens(words: torch.Tensor, piece: Piece, page_size: int) -> torch.Tensor:
    """A view [pages, P, w] of words [pages, W], in words of 32 bits if a token's bytes are no multiple of 8."""
    block = words[:, piece.offset // 8 : (piece.offset + page_size * piece.size_bytes) // 8]
    if piece.size_bytes % 8:
        block = block.view(torch.int32)
    return block.view(len(block), page_size, -1)


def _rows(
    chunks: Sequence[Chunk],
    starts: Sequence[int],
    stops: Sequence[int],
    codes: Sequence[torch.Tensor],
    columns: int,
    backend: Memory,
    *,
    labels: Sequence[int] | None = None,
) -> Rows:
    """labels: the position whose code stands at starts[i]; the same by default."""
    places = places_of(chunks, starts, stops, columns)
    spans = zip(codes, starts if labels is None else labels, starts, stops, strict=True)
    return Rows(
        places=backend.index(places.entries),
        codes=_joined([row[label : label + stop - start] for row, label, start, stop in spans], backend),
        chunk=places.chunk,
        positions=places.positions,
    )


def _joined(codes: Sequence[torch.Tensor], backend: Memory) -> torch.Tensor:
    return backend.index(torch.cat([*codes]).numpy())


def ragged(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """starts[i], starts[i] + 1, ... for lengths[i] values, concatenated."""
    ends: IndexArray = lengths.cumsum()
    values: IndexArray = np.arange(ends[-1]) + (starts - (ends - lengths)).repeat(lengths)
    return values
