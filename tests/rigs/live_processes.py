"""What tests of engine processes ask about processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from rigs.forked import SERVER_NAME

SOON_S = 20.0


def poll(is_so: Callable[[], bool], within_s: float = SOON_S) -> bool:
    """Whether it becomes so in this time."""
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def children_of(pid: int) -> list[int]:
    """Processes that any thread of this one has started."""
    try:
        files = [*Path(f"/proc/{pid}/task").glob("*/children")]
        found = [int(child) for file in files for child in file.read_text(encoding="ascii").split()]
    except OSError:  # a thread has ended meanwhile
        return []
    return [child for child in found if _name(child) != SERVER_NAME]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:  # it has ended meanwhile
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_files(pid: int) -> set[str]:
    """Files in memory that a process maps or holds open, by the name that they have, or that a memfd is given.

    A named one would be in /dev/shm. Only this process's count: others make and remove theirs there meanwhile.
    """
    named = {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            named.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name.removesuffix(" (deleted)") for name in named if name.startswith(("/dev/shm/", "/memfd:"))}
