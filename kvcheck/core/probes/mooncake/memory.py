"""Memory shared by the processes of a schedule. The judge writes sources and compares targets in it.

Each peer has a region in each plane, at the same offsets:

    SOURCE  sent by a writer                    TARGET  written by the peer's engine
    SEEN    a target as it was at a status      NEXT    a source's content after a failed write
    REUSED  a target's content after a failed write
    EXPECTED  a target's expected content, by all reports

The first and the last GUARD bytes of a region are never registered.
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
    SOURCE = 0
    TARGET = 1
    SEEN = 2
    NEXT = 3
    REUSED = 4
    EXPECTED = 5


SIZE = len(Plane) * MOST_PEERS * REGION


class MappedMemory:
    """The shared memory, mapped into this process. file: path of an existing one."""

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
        return f"/proc/{os.getpid()}/fd/{self._made}"

    def address(self, plane: Plane, peer: int, at: int) -> int:
        return self.base + offset(plane, peer, at)

    def write(self, plane: Plane, peer: int, at: int, data: bytes | memoryview) -> None:
        start = offset(plane, peer, at)
        self._mapped[start : start + len(data)] = data

    def read(self, plane: Plane, peer: int, at: int, size: int) -> bytes:
        start = offset(plane, peer, at)
        return self._mapped[start : start + size]

    def copy(self, source: Plane, target: Plane, peer: int, at: int, size: int) -> None:
        ctypes.memmove(self.address(target, peer, at), self.address(source, peer, at), size)

    def is_equal(self, one: Plane, other: Plane, peer: int, at: int, size: int) -> bool:
        return not _memcmp(self.address(one, peer, at), self.address(other, peer, at), size)

    def close(self) -> None:
        """The mapping stays until the process ends, because libraries may hold addresses of it."""
        if self._made is not None:
            os.close(self._made)
            self._made = None


def offset(plane: Plane, peer: int, at: int) -> int:
    return (int(plane) * MOST_PEERS + peer) * REGION + at
