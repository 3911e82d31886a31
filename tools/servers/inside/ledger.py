"""Ledger: what was put into one process, and how often each was called. It survives a process that is killed.

Invariants:
- A process has a file of its own, a line a name. A line keeps its place and length, so that a count is one write.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

WIDTH = 96


class Ledger:
    """The files of this process in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._lines: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._begin)

    def installed(self, name: str) -> None:
        """Note that `name` is in place; it was not called yet."""
        self.add(name, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            if self._file is None:
                self._file = os.open(self._folder / f"{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            line = self._lines.setdefault(name, len(self._lines))
            self._counts[name] = self._counts.get(name, 0) + count
            text = f"{name:<{WIDTH - 16}}{self._counts[name]:>15}\n"
            assert len(text) == WIDTH, f"a name of {len(name)} characters"
            os.pwrite(self._file, text.encode(), line * WIDTH)

    def _begin(self) -> None:
        """A forked process has a file of its own, once it has something to say."""
        self._lock = threading.Lock()
        self._lines, self._counts, self._file = {}, {}, None


def counts(folder: Path) -> dict[str, int]:
    """Name -> calls in all processes, of what was put in."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.txt")):
        for line in file.read_text().splitlines():
            name, count = line.rsplit(maxsplit=1)
            found[name] = found.get(name, 0) + int(count)
    return found
