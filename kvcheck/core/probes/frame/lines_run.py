"""Lines run: which lines of files below a folder are run by a call, in this thread and in those that it starts.

Invariants:
- A line counts if a function runs it. Lines outside functions run at the import, whoever is the first to import them.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
Note = Callable[[FrameType, str, Any], Any]


def lines_of(run: Callable[[], T], folder: Path, files: Sequence[str] = ("",)) -> tuple[T, dict[str, set[int]]]:
    """Return the call's result, and its lines by file. files: or folders, relative to `folder`, as the keys are."""
    seen: dict[str, set[int]] = {}
    notes: dict[str, Note | None] = {}  # every call of the process looks here, so it has to be quick
    root = Path(os.path.realpath(folder))

    def noting(path: str) -> Note | None:
        place = Path(os.path.realpath(path))
        if not place.is_relative_to(root) or not any(place.is_relative_to(root / each) for each in files):
            return None
        lines = seen.setdefault(place.relative_to(root).as_posix(), set())

        def note(frame: FrameType, event: str, argument: Any) -> Note:
            if event == "line":
                lines.add(frame.f_lineno)
            return note

        return note

    def enter(frame: FrameType, event: str, argument: Any) -> Note | None:
        path = frame.f_code.co_filename
        if path not in notes:
            notes[path] = noting(path)
        note = notes[path]  # none in the body of a module or a class
        return note if note is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED else None

    before, before_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        result = run()
    finally:
        sys.settrace(before)
        threading.settrace(before_of_threads)
    return result, {name: lines for name, lines in seen.items() if lines}


def as_ranges(lines: Collection[int]) -> str:
    """Return lines as "3-9,12"."""
    parts: list[list[int]] = []
    for line in sorted(lines):
        if parts and line == parts[-1][1] + 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def from_ranges(text: str) -> set[int]:
    """Inverse of as_ranges. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
