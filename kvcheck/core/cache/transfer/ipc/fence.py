"""Fence: a lock that shows when a peer that maps this process's memory has stopped writing it.

Invariants:
- The kernel releases the lock when its holder's process ends.
- A shut fence stays shut: a frozen peer that goes on writes nothing.
- A peer that is frozen within a copy holds the fence open: the memory it may write waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion


# writer, for each copy    take a shared lock of the fence, copy, release it; no lock, no copy
# owner, for a lost peer   take the exclusive lock: then no copy is in progress, and none begins
class Fence:
    def __init__(self, peer: str) -> None:
        self._region = SharedRegion(f"fence-{peer}", 1)

    def share(self) -> object:
        """For the peer's `read_fence`."""
        return to_plain(self._region.handle)

    def shut(self) -> bool:
        """True once no copy of the peer is in progress, and none can begin."""
        return _try_lock(self._region.fileno(), fcntl.LOCK_EX)


class Entry:
    """A writer's side, one for each copying thread, since a lock belongs to an open file."""

    def __init__(self, handle: RegionHandle) -> None:
        self._region = SharedRegion.attach(handle)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """True if copies are allowed in the block."""
        lock = self._region.fileno()
        if not _try_lock(lock, fcntl.LOCK_SH):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def close(self) -> None:
        self._region.close()


def read_fence(raw: object) -> RegionHandle:
    handle: RegionHandle = value_from(RegionHandle, raw, "fence")
    return handle


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
