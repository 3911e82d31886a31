"""PassPlan: the index tensors and expected codes of one forward pass over a batch.

Invariants:
- Positions come from the chunks alone. A kernel reads their rows from the pool's tables when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.backend.backend import Memory
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some positions of every chunk, one after another.

    places: [T] flat places in the request table. codes: [T] expected mix64(tag). chunk: [T] index of the chunk.
    positions: [T] logical positions.
    """

    places: torch.Tensor
    codes: torch.Tensor
    chunk: IndexArray
    positions: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """write, read, window: token positions. pages: page starts, with codes [pages, P] and valid [pages, P].

    rows: [B] request rows. state_read, state_write: [B] codes of the state before and after; fresh: [B] no state yet,
    so that the slot must be zero. numbers: [B] which chunks of the pass these are. tokens: sum of their stops.
    """

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
    """Build the plan. codes: request to [padded tokens] int64 in host memory, padded to whole pages.

    The plan is built in host memory and uploaded by the backend. It is complete on the device when this returns.

    numbers: which chunks of the pass these are; all of them by default.
    """
    size = pool.page_size
    mine = [codes[chunk.request_id] for chunk in chunks]
    counts = [pages_for(chunk.stop, size) for chunk in chunks]
    page_chunk = np.repeat(np.arange(len(chunks)), counts)
    page_number = ragged(np.zeros(len(chunks), dtype=np.int64), np.array(counts))
    stops = np.array([chunk.stop for chunk in chunks])[page_chunk]
    valid = page_number[:, None] * size + np.arange(size) < stops[:, None]
    before = [
        row[max(0, chunk.start - 1) : max(0, chunk.start - 1) + 1] for row, chunk in zip(mine, chunks, strict=True)
    ]
    after = [row[chunk.stop - 1 : chunk.stop] for row, chunk in zip(mine, chunks, strict=True)]
    columns = pool.tables["req_to_token"].columns
    table_rows = np.array([chunk.holding.row for chunk in chunks], dtype=np.int64)
    window = None
    if pool.has_window:
        window = _rows([max(0, c.start + 1 - pool.shape.window) for c in chunks], chunks, mine, columns, backend)
    return PassPlan(
        chunks=tuple(chunks),
        write=_rows([chunk.start for chunk in chunks], chunks, mine, columns, backend),
        read=_rows([0] * len(chunks), chunks, mine, columns, backend),
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
        tokens=sum(chunk.stop for chunk in chunks),
    )


def _rows(
    starts: Sequence[int], chunks: Sequence[Chunk], codes: Sequence[torch.Tensor], columns: int, backend: Memory
) -> Rows:
    lengths = np.array([chunk.stop - start for start, chunk in zip(starts, chunks, strict=True)])
    which = np.repeat(np.arange(len(chunks)), lengths)
    positions = ragged(np.array(starts, dtype=np.int64), lengths)
    table_rows = np.array([chunk.holding.row for chunk in chunks], dtype=np.int64)
    return Rows(
        places=backend.index(table_rows[which] * columns + positions),
        codes=_joined(
            [row[start : chunk.stop] for row, start, chunk in zip(codes, starts, chunks, strict=True)], backend
        ),
        chunk=which,
        positions=positions,
    )


def _joined(codes: Sequence[torch.Tensor], backend: Memory) -> torch.Tensor:
    """Codes of several requests, one after the other, on the device."""
    return backend.index(torch.cat([*codes]).numpy())


def ragged(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """starts[i], starts[i] + 1, ... for lengths[i] values, one run after another."""
    ends = np.cumsum(lengths)
    ragged: IndexArray = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return ragged
