"""FileStore: a page store in a folder, with one file for each object, complete or absent.

Invariants:
- An object's name appears by one rename, after its bytes are on disk. The directory is on disk before `put` ends.
- Entries below the store's folder are opened without following links; only regular files are read.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcheck.core.base.errors import StorageError, UsageError
from kvcheck.core.cache.hicache.storage import check_key, object_bytes, pack_object, unpack_object

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)  # non-blocking: a FIFO in an object's place must not hang
DRAFT = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DRAFT_NAME = re.compile(r"\d+-\d+\.draft")


# <folder>/drafts/<pid>-<n>.draft     being written, locked by its writer
# <folder>/ab/cd/abcd...              an object, named by its key
class FileStore:
    """Objects in `folder`, shared by any number of processes of one machine."""

    name = "files"

    def __init__(self, folder: Path) -> None:
        self.refused = 0
        self.folder = folder
        self._mutex = threading.Lock()
        self._ordinals = itertools.count()
        self._durable: set[str] = set()  # fan-out folders with names synced to disk
        self._root = self._drafts = -1
        try:
            _make_folder(folder)
            self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._drafts = _open_folder(self._root, "drafts", make=True)
            self._remove_stale_drafts()
            with self._draft() as (name, _):  # the proof that the folder can be written
                os.unlink(name, dir_fd=self._drafts)
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot use {folder} as a page store: {error.strerror}; expected a folder that can be written"
            ) from error

    def put(self, key: str, payload: bytes) -> None:
        self._check(key)
        data = pack_object(key, payload)
        try:
            with self._shelf(key, make=True) as shelf:
                if not _holds(shelf, key, data):
                    self._write(shelf, key, data)
                self._sync(shelf)  # even if the object was there: its writer may have died before this step
        except OSError as error:
            raise StorageError(
                f"page store {self.folder} could not keep {len(data)} bytes as {key[:2]}/{key[2:4]}/{key}: "
                f"{error.strerror}; no part of them was left"
            ) from error

    def get(self, key: str, size: int) -> bytes | None:
        self._check(key)
        try:
            with self._shelf(key) as shelf:
                data = _read_object(shelf, key, size=object_bytes(key, size))
        except FileNotFoundError:
            return None
        except OSError:  # a link or a file in a folder's place, a disk that cannot read its sector
            data = b""
        payload = unpack_object(data, key=key, size=size)
        if payload is None:
            with self._mutex:
                self.refused += 1
        return payload

    def contains(self, key: str) -> bool:
        self._check(key)
        try:
            with self._shelf(key) as shelf:
                return stat.S_ISREG(_status(shelf, key).st_mode)
        except OSError:
            return False

    def remove(self, key: str) -> None:
        """Remove `key`. After a power cut it may be there again, with the right bytes."""
        self._check(key)
        try:
            with self._shelf(key) as shelf:
                os.unlink(key, dir_fd=shelf)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"page store {self.folder} could not remove {key}: {error.strerror}") from error

    def close(self) -> None:
        for descriptor in (self._root, self._drafts):
            if descriptor >= 0:
                os.close(descriptor)
        self._root = self._drafts = -1

    def _check(self, key: str) -> None:
        check_key(key)
        if self._root < 0:
            raise StorageError(f"page store {self.folder} is closed")

    def _write(self, shelf: int, key: str, data: bytes) -> None:
        with self._draft() as (name, draft):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(draft, rest) :]
            self._sync(draft)
            os.replace(name, key, src_dir_fd=self._drafts, dst_dir_fd=shelf)

    def _sync(self, opened: int) -> None:
        os.fsync(opened)

    @contextmanager
    def _shelf(self, key: str, *, make: bool = False) -> Iterator[int]:
        """Open the folder of `key`. Raise FileNotFoundError if it is missing, unless `make`."""
        outer = _open_folder(self._root, key[:2], make=make)
        try:
            shelf = _open_folder(outer, key[2:4], make=make)
            try:
                if make and key[:4] not in self._durable:
                    self._sync(self._root)
                    self._sync(outer)
                    self._durable.add(key[:4])
                yield shelf
            finally:
                os.close(shelf)
        finally:
            os.close(outer)

    @contextmanager
    def _draft(self) -> Iterator[tuple[str, int]]:
        """(name, open file) of a new locked draft; removed at the end unless it was renamed."""
        name, draft = self._new_draft()
        try:
            yield name, draft
        finally:
            # By link count, not by name: after the rename the name is free, and may already be another writer's.
            if os.fstat(draft).st_nlink and _is_same(self._drafts, name, draft):
                os.unlink(name, dir_fd=self._drafts)
            os.close(draft)

    def _new_draft(self) -> tuple[str, int]:
        for ordinal in self._ordinals:
            name = f"{os.getpid()}-{ordinal}.draft"
            try:
                draft = os.open(name, DRAFT, 0o644, dir_fd=self._drafts)
            except FileExistsError:  # left by a process that had this id before, or has it in another container
                continue
            with suppress(OSError):  # a file system without locks: no opener gets the lock, so none cleans up
                fcntl.flock(draft, fcntl.LOCK_EX)
            if os.fstat(draft).st_nlink:  # an opener may have cleaned it up before it was locked
                return name, draft
            os.close(draft)
        raise AssertionError("counting ended")

    def _remove_stale_drafts(self) -> None:
        # The kernel drops a lock with its holder, so a live writer's draft is never taken.
        for name in filter(DRAFT_NAME.fullmatch, os.listdir(self._drafts)):
            try:
                draft = os.open(name, READ, dir_fd=self._drafts)
            except OSError:  # renamed meanwhile, or not a draft
                continue
            try:
                fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(self._drafts, name, draft):
                    os.unlink(name, dir_fd=self._drafts)
            except OSError:  # its writer is alive
                continue
            finally:
                os.close(draft)


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each on disk before the next."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _open_folder(above: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
    return os.open(name, FOLDER, dir_fd=above)


def _status(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_same(folder: int, name: str, opened: int) -> bool:
    try:
        return os.path.samestat(_status(folder, name), os.fstat(opened))
    except FileNotFoundError:
        return False


def _holds(shelf: int, key: str, data: bytes) -> bool:
    """True if exactly `data` is there. An unreadable object is replaced if possible."""
    try:
        return _read_object(shelf, key, size=len(data)) == data
    except OSError:
        return False


def _read_object(shelf: int, key: str, *, size: int) -> bytes:
    """Read a regular file of exactly `size` bytes; b"" for anything else."""
    opened = os.open(key, READ, dir_fd=shelf)
    try:
        status = os.fstat(opened)  # first: a folder opens, and becomes no stream that would close it
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return b""
        with os.fdopen(opened, "rb", buffering=0, closefd=False) as stream:
            return stream.readall()
    finally:
        os.close(opened)
