"""Worn stores: page stores that lose, cut or flip something every so many reads, in memory and in files.

Invariants:
- Damage is done to what is stored, before it is read: the store itself has to notice.
- Which read, which byte and which kind follow from the count of reads alone.
- A machine that cannot keep the files stops the schedule, as UNKNOWN where it is full and as a usage error where there
  is no such folder: its faults are neither in the plan nor the target's, and a store that keeps less would make another
  schedule of the same line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvcheck.core.base.errors import (
    InternalError,
    KvcheckError,
    StorageError,
    UnknownVerdict,
    UsageError,
    machine_trouble,
)
from kvcheck.core.base.scratch import ScratchFolder
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import PageStore

WORN_EVERY = 11
"""Of so many reads of the store, one finds its object damaged."""


class WornMemory(MemoryStore):
    """Objects in a dict, on their last legs."""

    def __init__(self) -> None:
        super().__init__()
        self._wear = 0

    def get(self, key: str, size: int) -> bytes | None:
        """What is damaged must be refused, and what is lost recomputed."""
        self._wear += 1
        if self._wear % WORN_EVERY == 0 and self.contains(key):
            kind = self._wear // WORN_EVERY % 3
            if kind == 0 and (left := len(self._object(key))):  # it may have been cut short before
                self.corrupt(key, at=self._wear % left)
            elif kind == 1:
                self.truncate(key, size=self._wear % size)
            elif kind == 2:
                self.drop(key)
        return super().get(key, size)


class WornFiles(FileStore):
    """Objects in a folder, on a disk that is on its last legs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._wear = 0

    def put(self, key: str, payload: bytes) -> None:
        """Keep it: this store has no capacity, so what cannot be kept is the machine's fault."""
        try:
            super().put(key, payload)
        except StorageError as error:
            raise _unusable(error) from error

    def get(self, key: str, size: int) -> bytes | None:
        """As in memory, done to the file."""
        self._wear += 1
        if self._wear % WORN_EVERY == 0 and self.contains(key):
            try:
                self._damage(key, size)
            except OSError as error:
                raise _unusable(error) from error
        return super().get(key, size)

    def _damage(self, key: str, size: int) -> None:
        kind, path = self._wear // WORN_EVERY % 3, self.folder / key[:2] / key[2:4] / key
        if kind == 0 and (left := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(self._wear % left)
                byte = file.read(1)
                file.seek(self._wear % left)
                file.write(bytes((byte[0] ^ 0xFF,)))
        elif kind == 1:
            os.truncate(path, self._wear % size)
        elif kind == 2:
            path.unlink()


@contextmanager
def worn_store(kind: str | None) -> Iterator[PageStore | None]:
    """A new, empty store for one schedule, gone afterwards. kind: "memory", "files", or None for no store."""
    if kind is None:
        yield None
    elif kind == "memory":
        with closing(WornMemory()) as store:
            yield store
    elif kind == "files":
        with _temporary_folder() as folder, closing(WornFiles(folder.path)) as files:
            yield files
    else:
        raise InternalError(f"no worn store of kind {kind!r}")


def _temporary_folder() -> ScratchFolder:
    try:
        return ScratchFolder("store")
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> KvcheckError:
    if trouble := machine_trouble(error):
        return UnknownVerdict(trouble)
    return UsageError(
        f"this schedule keeps a page store in a temporary folder, which cannot be used: {error}; expected a folder "
        "that can be written and has room; next: set TMPDIR to one"
    )
