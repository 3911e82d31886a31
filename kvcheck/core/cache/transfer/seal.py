"""The seal: the last 64 bytes of a hand-over, which say whose bytes they close, how many, and their digest.

    [0, 8) magic  [8, 16) version  [16, 24) room  [24, 32) generation  [32, 40) bytes  [40, 48) digest
    [48, 56) zero  [56, 64) check word over the 56 bytes before it; all little-endian and unsigned

Invariants:
- A row parses only if it is, byte for byte, what its seal packs to: zeroed, poisoned and torn rows are no seal.
- Every field is a full 64-bit value and none of them is a sentinel: room 0 is a room like any other.
- A whole seal of an earlier user of the slot parses as what it is: whether room and generation are the expected ones is
  the reader's to judge.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

import torch

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.kernels.digest import digest_int

SEAL_BYTES = 64
_MAGIC = int.from_bytes(b"kvc-seal", "little")
_VERSION = 1
_CHECK_KEY = 0x7365616C2D763031
_WORDS = struct.Struct("<8Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """room: bootstrap_room. generation: of the slot's lease. bytes: of all legs together. digest: over all of them."""

    room: int
    generation: int
    bytes: int
    digest: int

    def __post_init__(self) -> None:
        if not all(0 <= value < 1 << 64 for value in astuple(self)):
            raise LayoutMismatch(f"every field of a seal is an unsigned 64-bit value, got {self}")

    def packed(self) -> torch.Tensor:
        """The row to send, [64] uint8; the caller's own."""
        return torch.frombuffer(bytearray(_packed(self)), dtype=torch.uint8)


def parse(row: torch.Tensor) -> Seal | None:
    """The seal that `row` [64] uint8 on the host holds, or None where it holds none, or not all of one."""
    if row.dtype != torch.uint8 or row.shape != (SEAL_BYTES,):
        raise LayoutMismatch(f"a seal is a row of {SEAL_BYTES} uint8, got {row.dtype}{[*row.shape]}")
    found = bytes(row.tolist())
    _, _, room, generation, size, digest, _, _ = _WORDS.unpack(found)
    seal = Seal(room=room, generation=generation, bytes=size, digest=digest)
    return seal if _packed(seal) == found else None


def _packed(seal: Seal) -> bytes:
    words = (_MAGIC, _VERSION, seal.room, seal.generation, seal.bytes, seal.digest, 0)
    return _WORDS.pack(*words, digest_int(words, key=_CHECK_KEY))
