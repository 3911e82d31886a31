"""Blocks: pairs pages by logical page, groups them into runs, cuts rows into shards, and makes blocks of bytes.

Invariants:
- Nothing is trimmed, and nothing is broadcast. If lengths disagree, the error names both.
- Every target rank gets every shard it keeps exactly once, from a source rank that keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcheck.core.base.errors import LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray, PageIndices
from kvcheck.core.cache.pools.shape import shard_range


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """Physical pages of consecutive logical pages from `first`. pages: [n] int64, a read-only copy."""

    first: int
    pages: PageIndices

    def __post_init__(self) -> None:
        given = np.asarray(self.pages)
        if self.first < 0 or given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise LayoutMismatch(
                f"a page run is a first logical page of at least 0 and one row of integers, got {self.first} and "
                f"{given.dtype}{list(given.shape)}"
            )
        owned = np.array(given, dtype=np.int64)
        owned.setflags(write=False)
        object.__setattr__(self, "pages", owned)

    @property
    def stop(self) -> int:
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSlice:
    """Neighbouring shards that one source rank sends to one target rank, by places in each end's own row."""

    source_rank: int
    target_rank: int
    source_first: int
    target_first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """One buffer at one end: [layers, rows, row_bytes] contiguous bytes.

    rows: with the padding unit 0. rows_per_unit: page_size for TOKEN rows, else 1. shards: of a row at this end.
    """

    layers: int
    rows: int
    row_bytes: int
    rows_per_unit: int
    shards: int

    def __post_init__(self) -> None:
        if min(self.layers, self.rows, self.row_bytes, self.rows_per_unit, self.shards) < 1:
            raise LayoutMismatch(f"every number of a row layout is at least 1, got {self}")
        if self.rows % self.rows_per_unit or self.row_bytes % self.shards:
            raise LayoutMismatch(f"rows must be whole units, and a row whole shards, got {self}")

    @property
    def units(self) -> int:
        return self.rows // self.rows_per_unit - 1

    @property
    def shard_bytes(self) -> int:
        return self.row_bytes // self.shards


def pair_pages(source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
    """Physical (source, target) of each logical page of `needed`, [m, 2].

    Raise LengthMismatch unless both ends hold every needed page and none behind them. Earlier pages are not paired: a
    window may start earlier at one end.

    SGLang paired state_indices by place and trimmed the longer list (#18727, #23323).
    """
    # logical page      0    1    2    3
    # source           [1]  [2]  [3]            a window that starts on page 0
    # target                [7]  [8]            the same window, started a page later
    # needed = 1..2         2>7  3>8            paired by page; by place in the list it would be 1>7, 2>8
    assert needed.step == 1 and 0 <= needed.start <= needed.stop, f"logical pages ascend one by one, got {needed}"
    if not (_holds(source, needed) and _holds(target, needed)):
        raise LengthMismatch(
            f"{what}: the ends disagree about the pages: source has {len(source.pages)} pages from logical page "
            f"{source.first}, target has {len(target.pages)} pages from logical page {target.first}; expected at both "
            f"ends pages [{needed.start}, {needed.stop}) and none behind them; nothing of it is sent"
        )
    if not needed:
        return np.empty((0, 2), dtype=np.int64)
    # Both end at the end of `needed`, so their remainders have one length.
    pairs: IndexArray = np.column_stack([run.pages[needed.start - run.first :] for run in (source, target)])
    return pairs


def group_contiguous(pairs: IndexArray) -> IndexArray:
    """Maximal runs (source, target, count), [k, 3], of `pairs` [m, 2] that advance by one on both sides."""
    assert pairs.ndim == 2 and pairs.shape[1] == 2, f"pairs are [m, 2], got {list(pairs.shape)}"
    return _merged(np.column_stack((pairs, np.ones(len(pairs), dtype=np.int64))))


def shard_slices(shards: int, sources: int, targets: int) -> tuple[ShardSlice, ...]:
    """Assign the shards of a row to pairs of ranks, in the order of the targets. Replicas are spread evenly over
    sources; sources in no slice are dummies."""
    for size in (sources, targets):
        shard_range(shards, 0, size)  # raises if neither number divides the other
    replicas, holders = (max(1, size // shards) for size in (sources, targets))
    slices: list[ShardSlice] = []
    for target in range(targets):
        keeps = shard_range(shards, target, targets)
        chosen = target % holders * replicas // holders  # of the ranks that keep a shard, which lie side by side
        for shard in keeps:
            source = shard * sources // shards + chosen
            at = shard - shard_range(shards, source, sources).start
            last = slices[-1] if shard > keeps.start else None
            if last and last.source_rank == source:
                first, to, count = last.source_first, last.target_first, last.count + 1
                slices.pop()
            else:
                first, to, count = at, shard - keeps.start, 1
            slices.append(
                ShardSlice(source_rank=source, target_rank=target, source_first=first, target_first=to, count=count)
            )
    return tuple(slices)


def byte_blocks(source: RowLayout, target: RowLayout, runs: IndexArray, piece: ShardSlice) -> IndexArray:
    """Blocks (source offset, target offset, bytes), [n, 3], that copy `piece` of each row of `runs` [k, 3]."""
    _check_layouts(source, target, piece)
    runs = _merged(runs)
    _check_ids("source", source, runs[:, 0], runs[:, 2])
    _check_ids("target", target, runs[:, 1], runs[:, 2])
    rows = runs * source.rows_per_unit  # (source row, target row, rows)
    if piece.count == source.shards == target.shards:
        lengths = rows[:, 2] * source.row_bytes
    else:
        ends = np.cumsum(rows[:, 2])
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - rows[:, 2], rows[:, 2])
        rows = np.repeat(rows, rows[:, 2], axis=0) + within[:, None]
        lengths = np.full(len(rows), piece.count * source.shard_bytes, dtype=np.int64)
    layers = np.arange(source.layers, dtype=np.int64)[:, None]
    blocks = np.empty((source.layers, len(rows), 3), dtype=np.int64)
    blocks[..., 0] = (layers * source.rows + rows[:, 0]) * source.row_bytes + piece.source_first * source.shard_bytes
    blocks[..., 1] = (layers * target.rows + rows[:, 1]) * target.row_bytes + piece.target_first * target.shard_bytes
    blocks[..., 2] = lengths
    return blocks.reshape(-1, 3)


def _holds(run: PageRun, needed: range) -> bool:
    if len(run.pages) and run.stop > needed.stop:
        return False
    return not needed or (run.first <= needed.start and run.stop == needed.stop)


def _merged(runs: IndexArray) -> IndexArray:
    """Join runs [k, 3] that are contiguous on both sides."""
    assert runs.ndim == 2 and runs.shape[1] == 3, f"runs are [k, 3], got {list(runs.shape)}"
    if not len(runs):
        return np.empty((0, 3), dtype=np.int64)
    goes_on = (runs[1:, :2] == runs[:-1, :2] + runs[:-1, 2:]).all(axis=1)
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    merged: IndexArray = np.column_stack((runs[starts, :2], np.add.reduceat(runs[:, 2], starts)))
    return merged


def _check_layouts(source: RowLayout, target: RowLayout, piece: ShardSlice) -> None:
    for name in ("layers", "rows_per_unit", "shard_bytes"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise LayoutMismatch(f"the ends disagree about {name}: source has {ours}, target has {theirs}")
    for end, layout, first in (("source", source, piece.source_first), ("target", target, piece.target_first)):
        if first < 0 or piece.count < 1 or first + piece.count > layout.shards:
            raise LayoutMismatch(
                f"a {end} row has {layout.shards} shards, got a piece of {piece.count} shards from {first}"
            )


def _check_ids(end: str, layout: RowLayout, firsts: IndexArray, counts: IndexArray) -> None:
    outside = (firsts < 1) | (counts < 1) | (firsts > layout.units - counts + 1)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise LayoutMismatch(
            f"{end} has the units 1 to {layout.units}, got {int(counts[at])} units from {int(firsts[at])}"
        )
