"""Scratch folders: temporary folders that are removed when their run ends, or else when the next run begins.

Invariants:
- A process owns a folder while it holds its lock, which the kernel releases when the process ends.
- Page stores lie in memory, if it has room and TMPDIR names no other folder: syncing each object takes a disk far
  longer than the schedule.
- A folder is removed only if this user owns it, its name has the form made here, and its lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Self

KINDS = ("ranks", "store")
MADE_HERE = re.compile(rf"kvcheck-({'|'.join(KINDS)})-[a-z0-9_]{{8}}")
FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TRIES = 100
MEMORY = Path("/dev/shm")
USUAL = ("/tmp", "/var/tmp")
ROOM_BYTES = 256 << 20
"""Free memory that stores need in MEMORY. A container often has less."""


class ScratchFolder:
    """A new, empty folder of this process. Closing removes it. kind: one of KINDS. Raises OSError."""

    def __init__(self, kind: str) -> None:
        assert kind in KINDS
        for _ in range(TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=f"kvcheck-{kind}-", dir=_folder_of(kind)))
            lock = _lock(self.path)
            if lock is not None:
                break
        else:
            raise OSError(f"{TRIES} folders in {_folder_of(kind)} were removed while they were made")
        self._end = weakref.finalize(self, _remove, str(self.path), lock)

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Swept:
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def sweep() -> Swept:
    """Remove the folders that ended runs of this user left. kept: those that could not be removed, with the reason."""
    removed, kept = [], []
    paths = [path for folder in {Path(tempfile.gettempdir()), MEMORY} for path in _made_in(folder)]
    for path in sorted(paths):
        try:
            if (lock := _lock(path, is_strict=True)) is None:
                continue
            try:
                shutil.rmtree(path)
                removed.append(str(path))
            finally:
                os.close(lock)
        except FileNotFoundError:  # another run removed it first
            continue
        except OSError as error:
            kept.append(f"{path}: {error.strerror}")
    return Swept(tuple(removed), tuple(kept))


def _folder_of(kind: str) -> str:
    usual = tempfile.gettempdir()
    return str(MEMORY) if kind == "store" and usual in USUAL and _has_room(MEMORY) else usual


def _has_room(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= ROOM_BYTES and os.access(folder, os.W_OK | os.X_OK)


def _made_in(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if MADE_HERE.fullmatch(entry.name)]
    except OSError:
        return []


def _lock(path: Path, *, is_strict: bool = False) -> int | None:
    """Lock a folder and return its descriptor; None if another process holds it or kvcheck has not made it.

    is_strict: None also on a file system without locks, since the folder may then be in use.
    """
    try:
        folder = os.open(path, FLAGS)
    except OSError:  # gone, a link, or another user's
        return None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, folder)
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            return None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            if is_strict:
                return None
        try:
            is_there = os.path.samestat(os.lstat(path), found)
        except FileNotFoundError:
            is_there = False
        if not is_there:
            return None
        on_failure.pop_all()
        return folder


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
