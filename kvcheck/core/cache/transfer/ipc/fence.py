"""Fence: tells when a peer that maps this process's memory writes it no more.

    writer, for each copy    take a shared lock of the fence, copy, give it back; no lock, no copy
    owner, for a lost peer   take the whole lock: then no copy is under way, and none begins

Invariants:
- The lock is one of the kernel's, on memory without a name. It is given back when the process that holds it ends.
- A shut fence stays shut. A peer that was frozen and goes on finds it so, and writes nothing.
- A peer that is frozen within a copy holds the fence open: memory that it may write waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion


class Fence:
    """The owner's side, for one peer."""

    def __init__(self, peer: str) -> None:
        self._region = SharedRegion(f"fence-{peer}", 1)

    def share(self) -> object:
        """For the peer's `Entry`: plain values."""
        return to_plain(self._region.handle)

    def shut(self) -> bool:
        """True once no copy of the peer is under way, and none can begin."""
        return _try_lock(self._region.fileno(), fcntl.LOCK_EX)


class Entry:
    """A writer's side. Each thread that copies has one of its own, since a lock belongs to who has opened the file."""

    def __init__(self, handle: RegionHandle) -> None:
        self._region = SharedRegion.attach(handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether one may copy until the end of the block: False if the fence is shut."""
        lock = self._region.fileno()
        if not _try_lock(lock, fcntl.LOCK_SH):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Nobody enters here any more."""
        self._region.close()


def read_fence(raw: object) -> RegionHandle:
    """The handle that a peer's `share` returned. Raises ValueError."""
    handle: RegionHandle = value_from(RegionHandle, raw, "fence")
    return handle


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
