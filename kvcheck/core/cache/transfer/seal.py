"""The seal: the last 64 bytes of a hand-over, with room, generation, length and digest of all bytes before them.

Invariants:
- A row is a seal only if packing the parsed values gives the same bytes. Zeroed, poisoned and torn rows are no seal.
- A whole seal of an earlier user of the slot parses too. The reader compares its room and generation.
- The digest covers every leg: all KV, all state, the metadata row. (mutants: seal-without-kv, -state, -aux)
- Words are taken in logical order, shard by shard, so both ends get the same sequence for any pages.
- A digest is keyed by room, generation and source rank: equal bytes of another room do not match.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.base.paging import IndexArray, locs_of
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.transfer.blocks import ShardSlice
from kvcheck.core.cache.transfer.layout import BufferLayout, EndLayout, Piece
from kvcheck.core.cache.transfer.wire import Ticket
from kvcheck.kernels.content import as_unsigned, mix64_int
from kvcheck.kernels.digest import combined, digest, digest_int
from kvcheck.kernels.digest_rows import digest_rows

SEAL_BYTES = 64
_MAGIC = int.from_bytes(b"kvc-seal", "little")
_VERSION = 1
_OWN_AT, _DIGEST_AT = 2, 5
_CHECK_KEY = 0x7365616C2D763031
# [0, 8) magic  [8, 16) version  [16, 24) room  [24, 32) generation  [32, 40) bytes  [40, 48) digest
# [48, 56) zero  [56, 64) check word over the 56 bytes before it; all little-endian and unsigned
_WORDS = struct.Struct("<8Q")
_FIXED = digest_int((_MAGIC, _VERSION), key=_CHECK_KEY) + digest_int((0,), key=_CHECK_KEY, first=_DIGEST_AT + 1)
"""Part of the check word from the words that all seals share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """room: bootstrap_room, any value. bytes, digest: of all legs together."""

    room: int
    generation: int
    bytes: int
    digest: int

    def __post_init__(self) -> None:
        if not all(0 <= value < 1 << 64 for value in astuple(self)):
            raise LayoutMismatch(f"every field of a seal is an unsigned 64-bit value, got {self}")

    def packed(self) -> torch.Tensor:
        """[64] uint8, owned by the caller."""
        return torch.frombuffer(bytearray(_packed(self)), dtype=torch.uint8)


def parse(row: torch.Tensor) -> Seal | None:
    """The seal in `row`, [64] uint8 in host memory; None if it is not complete."""
    if row.dtype != torch.uint8 or row.shape != (SEAL_BYTES,):
        raise LayoutMismatch(f"a seal is a row of {SEAL_BYTES} uint8, got {row.dtype}{[*row.shape]}")
    found = bytes(row.tolist())
    _, _, room, generation, size, digest, _, _ = _WORDS.unpack(found)
    seal = Seal(room=room, generation=generation, bytes=size, digest=digest)
    return seal if _packed(seal) == found else None


def _packed(seal: Seal) -> bytes:
    words = (_MAGIC, _VERSION, seal.room, seal.generation, seal.bytes, seal.digest, 0)
    return _WORDS.pack(*words, digest_int(words, key=_CHECK_KEY))


def known_words(seal: Seal) -> npt.NDArray[np.int64]:
    """Pack a row without its digest, which counts as zero in the check word."""
    own = (seal.room, seal.generation, seal.bytes)
    check = as_unsigned(_FIXED + digest_int(own, key=_CHECK_KEY, first=_OWN_AT))
    return np.frombuffer(bytearray(_WORDS.pack(_MAGIC, _VERSION, *own, 0, 0, check)), dtype=np.int64)


def sealed_words(known: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """The whole row, [8] int64, made on the device without waiting. total: the digest, an int64 scalar; None: zero."""
    words = known.clone()
    if total is not None:
        words[_DIGEST_AT] = total
    words[-1].add_(digest(words[_DIGEST_AT : _DIGEST_AT + 1], key=_CHECK_KEY, first=_DIGEST_AT))
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All bytes from one source rank to one target rank for a room, as they lie at one end."""

    ticket: Ticket
    source_rank: int
    units: Mapping[tuple[str, str], IndexArray]  # physical, by leg and space, in logical order
    pieces: Mapping[Piece, tuple[int, int]]  # by buffer, (first shard, count) in this end's row
    row: torch.Tensor | None  # the metadata row, or None if another rank sends it


@dataclass(frozen=True, slots=True, kw_only=True)
class SealPlan:
    known: torch.Tensor  # the row without the digest, [8] int64 on the device
    size: int  # bytes covered
    covered: tuple[tuple[torch.Tensor, torch.Tensor, int], ...]  # by buffer: words [L, R, W], row ids, key
    row: torch.Tensor | None
    key: int  # of the metadata row


class Sealer:
    def __init__(self, pool: KVPool, layout: EndLayout, backend: Backend) -> None:
        self._pool = pool
        self._layout = layout
        self._backend = backend

    def plan(self, content: Content) -> SealPlan:
        """Prepare a seal before its bytes are read. Uploads are complete."""
        ticket, key = content.ticket, self._key(content)
        covered, size = [], 0
        for place, buffer in enumerate(self._buffers(content)):
            units = content.units[buffer.leg, buffer.space]
            rows = buffer.rows.rows_per_unit
            ids = units if rows == 1 else locs_of(units, 0, len(units) * rows, rows)
            words = self._words(buffer, content.pieces[buffer.space, buffer.name])
            on_device = self._backend.index(np.asarray(ids, dtype=np.int64))
            covered.append((words, on_device, mix64_int(key + place + 1)))
            size += words.shape[0] * len(ids) * words.shape[2] * 8
        if content.row is not None:
            size += content.row.numel()
        seal = Seal(room=ticket.room, generation=ticket.generation, bytes=size, digest=0)
        known = self._backend.index(known_words(seal))
        return SealPlan(known=known, size=size, covered=tuple(covered), row=content.row, key=mix64_int(key))

    def seal(self, plan: SealPlan) -> torch.Tensor:
        """The seal of this end's current memory, [8] int64 on the device, made inside an operation without waiting.

        SGLang reported a request as done without evidence that bytes over NVLink had landed (#23252).
        """
        parts = [digest_rows(words, rows, key=key) for words, rows, key in plan.covered]
        if plan.row is not None:
            parts.append(digest(plan.row.contiguous().view(torch.int64), key=plan.key))
        return sealed_words(plan.known, combined(torch.stack(parts)) if parts else None)

    def _buffers(self, content: Content) -> list[BufferLayout]:
        """The buffers that a seal covers. (mutants: seal-without-kv, seal-without-state)"""
        return [each for each in self._layout.buffers if (each.space, each.name) in content.pieces]

    def _words(self, buffer: BufferLayout, shards: tuple[int, int]) -> torch.Tensor:
        first, count = (each * buffer.rows.shard_bytes // 8 for each in shards)
        return self._pool.sets[buffer.space].write_view(buffer.name)[:, :, first : first + count]

    def _key(self, content: Content) -> int:
        ticket = content.ticket
        return mix64_int(mix64_int(mix64_int(ticket.room) ^ ticket.generation) + content.source_rank)


def piece_of(slices: Mapping[Piece, ShardSlice], *, at_source: bool) -> dict[Piece, tuple[int, int]]:
    """(first shard, count) of each buffer in one end's own row."""
    return {key: (each.source_first if at_source else each.target_first, each.count) for key, each in slices.items()}
