"""Misuse of page stores in folders, and what such a store leaves behind: locks, links and synced bytes.

Invariants:
- Each row has a folder of its own.
- A power failure leaves what was synced: bytes of a file, and names of a folder, as they were when that was done last.
  Whether a folder that an engine was given is on the disk itself is not looked at.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from kvcheck.core.base.errors import CheckFailed, StorageError, UsageError
from kvcheck.core.base.scratch import ScratchFolder
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.storage import object_bytes, pack_object
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.stores import BYTES, CALLS, KEY, OTHER, WRONG_KEYS, Stores, with_key

WHOLE = object_bytes(KEY, len(BYTES))
MORE_THAN_READ = 0o133
"""Rights that nobody but the owner has of an object's file, and that to run it."""


class WatchedStore(FileStore):
    """A store that notes what is on the disk. meanwhile: is done while an object's bytes are written.

    files: by inode, the bytes that were synced last. folders: by inode, the names that were, each with its inode.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        super().__init__(folder)

    def _sync(self, opened: int) -> None:
        super()._sync(opened)
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            self.folders[status.st_ino] = {
                name: os.stat(name, dir_fd=opened, follow_symlinks=False).st_ino for name in os.listdir(opened)
            }
        else:
            self.meanwhile()
            self.files[status.st_ino] = os.pread(opened, status.st_size, 0)

    def inode(self, key: str) -> int | None:
        """The file that a power failure leaves under the key."""
        at: int | None = os.stat(self.folder).st_ino
        for name in (key[:2], key[2:4], key):
            at = self.folders.get(at, {}).get(name) if at is not None else None
        return at

    def left(self, key: str) -> bytes | None:
        """The bytes that a power failure leaves under the key."""
        inode = self.inode(key)
        return None if inode is None else self.files.get(inode)


def _path(store: FileStore, key: str) -> Path:
    return store.folder / key[:2] / key[2:4] / key


def _in_folder(act: Callable[[FileStore], object], room: int | None = 0) -> Callable[[Stores], object]:
    """Do it with a new store in a folder, with room for an object and so many bytes more; None: without a bound."""

    def call(stores: Stores) -> object:
        with ScratchFolder("store") as folder, _opened(folder.path, None if room is None else WHOLE + room) as store:
            return act(store)

    return call


@contextmanager
def _opened(folder: Path, capacity: int | None) -> Iterator[FileStore]:
    """A store. Raises CheckFailed where its count is locked by nobody's call: the next one would wait for ever."""
    with closing(FileStore(folder, capacity)) as store:
        if capacity is not None and _is_locked(folder / "used"):
            raise CheckFailed("the count of a folder stays locked while nobody changes it")
        yield store


def _is_locked(path: Path) -> bool:
    """Whether somebody has the lock of a file."""
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def _watched(act: Callable[[WatchedStore], object]) -> Callable[[Stores], object]:
    """Do it with a new store that notes what is on the disk."""

    def call(stores: Stores) -> object:
        with ScratchFolder("store") as folder, closing(WatchedStore(folder.path)) as store:
            return act(store)

    return call


def _closed_file(call: str) -> Callable[[FileStore], object]:
    def act(store: FileStore) -> object:
        store.close()
        return CALLS[call](store, KEY)

    return act


def _refill(store: FileStore) -> bool:
    """Objects that there is just room for, one after another under one key."""
    for payload in (BYTES, BYTES[::-1]):
        store.put(KEY, payload)
    is_kept = store.get(KEY, len(BYTES)) == BYTES[::-1]
    store.remove(KEY)
    store.put(OTHER, BYTES)
    return is_kept and store.get(OTHER, len(BYTES)) == BYTES and not store.contains(KEY)


def _overfill(store: FileStore) -> None:
    """A second object where there is room for one."""
    store.put(KEY, BYTES)
    store.put(OTHER, b"")


def _bounded_later(store: FileStore) -> None:
    """A second object where there is room for one, which was there before the bound."""
    store.put(KEY, BYTES)
    with _opened(store.folder, WHOLE) as bounded:
        bounded.put(OTHER, b"")


def _put_twice(store: FileStore) -> bool:
    """Equal bytes stay as they are, in a file that nobody else may write and nobody can run."""
    store.put(KEY, BYTES)
    before = _path(store, KEY).stat()
    store.put(KEY, BYTES)
    after = _path(store, KEY).stat()
    return after.st_ino == before.st_ino and not stat.S_IMODE(after.st_mode) & MORE_THAN_READ


def _damaged(store: FileStore) -> bool:
    """A damaged object gives nothing, which is counted; whoever puts the right bytes replaces it."""
    store.put(KEY, BYTES)
    _path(store, KEY).write_bytes(pack_object(KEY, BYTES)[:-1])
    given = store.contains(KEY), store.get(KEY, len(BYTES)), store.refused
    store.put(KEY, BYTES)
    return given == (True, None, 1) and store.get(KEY, len(BYTES)) == BYTES


def _linked(store: FileStore) -> bool:
    """A link in an object's place is no object; a put replaces it, and not what it leads to."""
    store.put(KEY, BYTES)
    away = store.folder / "elsewhere"
    _path(store, KEY).rename(away)
    _path(store, KEY).symlink_to(away)
    given = store.contains(KEY), store.get(KEY, len(BYTES))
    store.put(KEY, BYTES[::-1])
    is_replaced = store.get(KEY, len(BYTES)) == BYTES[::-1]
    return given == (False, None) and is_replaced and away.read_bytes() == pack_object(KEY, BYTES)


def _on_disk(store: WatchedStore) -> bool:
    """Every object is on the disk, whole and under its name, when its put returns."""
    puts = ((KEY, BYTES), (OTHER, BYTES), (KEY, BYTES[::-1]))
    for key, payload in puts:
        store.put(key, payload)
        if store.left(key) != pack_object(key, payload):
            return False
    return True


def _found_there(store: WatchedStore) -> bool:
    """The name of an object that another writer left is on the disk when a put of equal bytes returns."""
    with closing(FileStore(store.folder)) as other:
        other.put(KEY, BYTES)
    store.put(KEY, BYTES)
    return store.inode(KEY) == _path(store, KEY).stat().st_ino


def _opened_meanwhile(store: WatchedStore) -> bool:
    """Whoever opens the folder while an object is written leaves its draft."""
    store.meanwhile = lambda: FileStore(store.folder).close()
    store.put(KEY, BYTES)
    return store.get(KEY, len(BYTES)) == BYTES


FILES: tuple[Misuse[Stores], ...] = (
    *(Misuse(f"{call} in a folder that is closed", StorageError, _in_folder(_closed_file(call))) for call in CALLS),
    *(
        Misuse(f"{call} in a folder, with a key {key}", UsageError, _in_folder(partial(with_key, call, key), None))
        for call, key in zip(CALLS, WRONG_KEYS, strict=False)
    ),
    Misuse("put into a folder without room", StorageError, _in_folder(_overfill)),
    Misuse("put into a folder that was full before it had a bound", StorageError, _in_folder(_bounded_later, None)),
    Misuse(
        "put of an object that a folder never has room for",
        StorageError,
        _in_folder(lambda store: store.put(KEY, BYTES), -1),
    ),
    Misuse("put of objects that a folder has just room for", None, _in_folder(_refill)),
    Misuse("put of equal bytes into a folder", None, _in_folder(_put_twice, None)),
    Misuse("get of an object of a folder that lacks its last byte", None, _in_folder(_damaged, None)),
    Misuse("a link in the place of an object", None, _in_folder(_linked, None)),
    Misuse("a power failure behind a put", None, _watched(_on_disk)),
    Misuse("a power failure behind a put of what is there", None, _watched(_found_there)),
    Misuse("a folder that is opened while an object is written", None, _watched(_opened_meanwhile)),
)


def folder_attempts() -> list[Attempt]:
    """Of stores in folders of their own."""
    return on_each(FILES, Stores(), lambda stores: None)
