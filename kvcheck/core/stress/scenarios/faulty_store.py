"""Faulty stores: page stores that lose, truncate or corrupt an object every so many reads, in memory and in files.

Invariants:
- An object is damaged before it is read, so that the store itself has to notice. The count of reads decides the damage.
- A machine that cannot keep the files stops the schedule: UNKNOWN if the disk is full, a usage error without the
  folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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

DAMAGE_EVERY = 11
"""One of so many reads of the store finds its object damaged."""


class FaultyMemoryStore(MemoryStore):
    def __init__(self, tell: Callable[[str], None], every: int | None = DAMAGE_EVERY) -> None:
        super().__init__()
        self._tell, self._every = tell, every
        self._reads = 0

    def get(self, key: str, size: int) -> bytes | None:
        self._reads += 1
        if self._every is not None and self._reads % self._every == 0 and self.contains(key):
            self._tell(key)
            kind = self._reads // DAMAGE_EVERY % 3
            if kind == 0 and (left := len(self._object(key))):  # it may have been cut short before
                self.corrupt(key, at=self._reads % left)
            elif kind == 1:
                self.truncate(key, size=self._reads % size)
            elif kind == 2:
                self.drop(key)
        return super().get(key, size)


class FaultyFileStore(FileStore):
    def __init__(self, folder: Path, tell: Callable[[str], None], every: int | None = DAMAGE_EVERY) -> None:
        super().__init__(folder)
        self._tell, self._every = tell, every
        self._reads = 0

    def put(self, key: str, payload: bytes) -> None:
        """This store has no limit, so a failure is the machine's fault."""
        try:
            super().put(key, payload)
        except StorageError as error:
            raise _unusable(error) from error

    def get(self, key: str, size: int) -> bytes | None:
        self._reads += 1
        if self._every is not None and self._reads % self._every == 0 and self.contains(key):
            self._tell(key)
            try:
                self._damage(key, size)
            except OSError as error:
                raise _unusable(error) from error
        return super().get(key, size)

    def _damage(self, key: str, size: int) -> None:
        kind, path = self._reads // DAMAGE_EVERY % 3, self.folder / key[:2] / key[2:4] / key
        if kind == 0 and (left := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(self._reads % left)
                byte = file.read(1)
                file.seek(self._reads % left)
                file.write(bytes((byte[0] ^ 0xFF,)))
        elif kind == 1:
            os.truncate(path, self._reads % size)
        elif kind == 2:
            path.unlink()


@contextmanager
def faulty_store(
    kind: str | None, tell: Callable[[str], None] = lambda key: None, *, is_faulty: bool = True
) -> Iterator[PageStore | None]:
    """kind: "memory", "files", or None for no store. tell: receives the key of each damaged object."""
    every = DAMAGE_EVERY if is_faulty else None
    if kind is None:
        yield None
    elif kind == "memory":
        with closing(FaultyMemoryStore(tell, every)) as store:
            yield store
    elif kind == "files":
        with _temporary_folder() as folder, closing(FaultyFileStore(folder.path, tell, every)) as files:
            yield files
    else:
        raise InternalError(f"no faulty store of kind {kind!r}; expected memory or files")


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
