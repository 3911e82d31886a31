"""Plan of a write: blocks are checked against both ends, merged, and cut into calls that the engine can make.

Invariants:
- Before anything is sent, every block lies inside its two regions, and no two share a target.
- Neighbouring blocks become one entry, because an entry of any size costs the engine tens of microseconds.
- A call has at most ENTRIES_OF_A_CALL entries. Twice as many fail, and repeating that cuts the peer off for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcheck.core.base.errors import InternalError, TransferError
from kvcheck.core.base.paging import IndexArray

ENTRIES_OF_A_CALL = 1024
BYTES_OF_A_CALL = 256 << 20
"""The library allows a call a fixed time and a nanosecond a byte; a busy machine is slower."""

LARGEST = 1 << 61
"""Largest offset or length; far above any address space."""

Extent: TypeAlias = tuple[int, int]
"""(address, bytes) of a region in the process that registered it."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks between two regions: int64 [n, 3]: source offset, target offset, bytes."""

    local: str
    remote: str
    blocks: IndexArray

    def __post_init__(self) -> None:
        if self.blocks.dtype != np.int64 or self.blocks.ndim != 2 or self.blocks.shape[1] != 3:
            raise TransferError(
                f"blocks from {self.local} to {self.remote}: expected int64 [n, 3], "
                f"got {self.blocks.dtype} {list(self.blocks.shape)}"
            )


def entries_of(batches: Sequence[BlockBatch], local: Mapping[str, Extent], remote: Mapping[str, Extent]) -> IndexArray:
    """[3, m]: local addresses, remote addresses and bytes, by rising remote address, merged within a batch."""
    parts = [
        _entries_of_batch(batch, _extent(batch.local, local, "here"), _extent(batch.remote, remote, "at the peer"))
        for batch in batches
        if len(batch.blocks)
    ]
    if not parts:
        return np.empty((3, 0), dtype=np.int64)
    if len(parts) == 1:
        return parts[0]
    entries = np.concatenate(parts, axis=1)
    entries = entries[:, np.argsort(entries[1], kind="stable")]
    _check_disjoint(entries[1], entries[2], "the batches of one write")
    return entries


def calls_of(entries: IndexArray) -> Iterator[IndexArray]:
    """Pieces [3, k] that one engine call can take."""
    count = entries.shape[1]
    if count <= ENTRIES_OF_A_CALL and int(entries[2].sum()) <= BYTES_OF_A_CALL:
        yield entries
        return
    ends = np.cumsum(entries[2])
    start = 0
    while start < count:
        done = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, done + BYTES_OF_A_CALL, side="right"))
        stop = min(max(stop, start + 1), start + ENTRIES_OF_A_CALL)
        yield entries[:, start:stop]
        start = stop


def _entries_of_batch(batch: BlockBatch, local: Extent, remote: Extent) -> IndexArray:
    """Entries of a batch, in few passes, since every write pays for them."""
    columns = batch.blocks.T.copy()  # C order, and never the caller's
    source, target, length = columns
    if (
        columns.min() < 0
        or columns.max() > LARGEST  # sums of two cannot wrap from here on
        or length.min() < 1
        or (source + length).max() > local[1]
        or (ends := target + length).max() > remote[1]
    ):
        raise _misplaced(batch, local[1], remote[1])
    room = target[1:] - ends[:-1]
    least = room.min(initial=1)
    if least < 0:  # not by rising target, or shared
        columns = columns[:, np.argsort(target, kind="stable")]
        source, target, length = columns
        _check_disjoint(target, length, f"remote region {batch.remote}")
        room = target[1:] - target[:-1] - length[:-1]
        least = room.min(initial=1)
    if least == 0:
        starts = np.ones(len(target), dtype=np.bool_)
        starts[1:] = (room != 0) | (source[1:] - source[:-1] != length[:-1])
        first = np.flatnonzero(starts)
        columns = np.stack((source[first], target[first], np.add.reduceat(length, first)))
    columns[0] += local[0]
    columns[1] += remote[0]
    return columns


def _extent(name: str, extents: Mapping[str, Extent], where: str) -> Extent:
    if name not in extents:
        raise TransferError(f"no region {name!r} {where}; there are: {', '.join(extents) or 'none'}")
    return extents[name]


def _misplaced(batch: BlockBatch, local_bytes: int, remote_bytes: int) -> TransferError:
    """Error for the first block outside its regions. Python integers do not wrap."""
    for at, (source, target, length) in enumerate(batch.blocks.tolist()):
        for where, offset, size in (
            (f"local region {batch.local}", source, local_bytes),
            (f"remote region {batch.remote}", target, remote_bytes),
        ):
            if length < 1 or offset < 0 or offset + length > size:
                return TransferError(
                    f"block {at} of {len(batch.blocks)} is not inside {where}: offset {offset}, {length} bytes, "
                    f"expected 1 byte or more within {size}; nothing was sent"
                )
    raise InternalError(f"blocks from {batch.local} to {batch.remote} were refused and each is in place")


def _check_disjoint(target: IndexArray, length: IndexArray, where: str) -> None:
    shared = np.flatnonzero(target[:-1] + length[:-1] > target[1:])
    if len(shared):
        at = int(shared[0])
        raise TransferError(
            f"two blocks have one target in {where}: [{target[at]}, {target[at] + length[at]}) and "
            f"[{target[at + 1]}, {target[at + 1] + length[at + 1]}); nothing was sent"
        )
