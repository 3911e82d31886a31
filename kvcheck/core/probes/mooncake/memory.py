"""Memory: what the processes of a schedule share. The judge writes sources in it and looks at targets.

Each peer has a region in each plane, at the same offsets:

    SOURCE  what a writer sends                 TARGET  where its peer's engine writes
    SEEN    a target as it was at a status      NEXT    what a source holds after a failed write
    REUSED  what a target holds after a failed write
    EXPECTED  what a target should hold, by all that was reported

Invariants:
- All processes map the same memory, so a look at a target is a look at the receiver's own bytes.
- The first and the last GUARD bytes of a region are registered by nobody.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum

REGION = 16 << 20
GUARD = 64 << 10
MOST_PEERS = 4

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Plane(IntEnum):
    """A copy of all regions, for one use."""

    SOURCE = 0
    TARGET = 1
    SEEN = 2
    NEXT = 3
    REUSED = 4
    EXPECTED = 5


SIZE = len(Plane) * MOST_PEERS * REGION


class Memory:
    """The shared memory, mapped into this process. file: where the one who made it has it open."""

    def __init__(self, file: str | None = None) -> None:
        if file is None:
            self._made: int | None = os.memfd_create("kvcheck-transfer")
            os.ftruncate(self._made, SIZE)
            self._mapped = mmap.mmap(self._made, SIZE)
        else:
            self._made = None
            opened = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            self._mapped = mmap.mmap(opened, SIZE)
            os.close(opened)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

    @property
    def file(self) -> str:
        """Where a process of the same user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._made}"

    def address(self, plane: Plane, peer: int, at: int) -> int:
        """Where a byte lies in this process."""
        return self.base + offset(plane, peer, at)

    def write(self, plane: Plane, peer: int, at: int, data: bytes | memoryview) -> None:
        """Put bytes there."""
        start = offset(plane, peer, at)
        self._mapped[start : start + len(data)] = data

    def read(self, plane: Plane, peer: int, at: int, size: int) -> bytes:
        """A copy of the bytes there."""
        start = offset(plane, peer, at)
        return self._mapped[start : start + size]

    def copy(self, source: Plane, target: Plane, peer: int, at: int, size: int) -> None:
        """Copy bytes between planes, at the same place of the same peer."""
        ctypes.memmove(self.address(target, peer, at), self.address(source, peer, at), size)

    def is_equal(self, one: Plane, other: Plane, peer: int, at: int, size: int) -> bool:
        """Whether two planes hold the same bytes there now."""
        return not _memcmp(self.address(one, peer, at), self.address(other, peer, at), size)

    def close(self) -> None:
        """Give the file back. The mapping ends with the process, because libraries may still hold addresses of it."""
        if self._made is not None:
            os.close(self._made)
            self._made = None


def offset(plane: Plane, peer: int, at: int) -> int:
    """Where a byte lies in the memory."""
    return (int(plane) * MOST_PEERS + peer) * REGION + at
