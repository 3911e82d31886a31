"""Reach: which lines of the cache each schedule of a cell runs, in the code as it is.

Invariants:
- A line counts for a schedule exactly if that schedule runs it; the reference run does not count.
- Lines outside functions run at the import, so every schedule of a cell that runs anything of their file reaches them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


class LineTrace:
    """The lines below a folder that run inside `tracing`, by file."""

    def __init__(self, folder: Path, below: str) -> None:
        self._folder = str(folder) + "/"
        self._prefix = f"{folder}/{below}/"
        self._open: dict[CodeType, set[int] | None] = {}
        self._seen: dict[str, set[int]] = {}

    @contextmanager
    def tracing(self) -> Iterator[dict[str, set[int]]]:
        """Trace this thread inside the block; the dictionary fills as lines run."""
        self._open, self._seen = {}, {}
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield self._seen
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        code = frame.f_code
        if code not in self._open:
            inside = code.co_filename.startswith(self._prefix)
            self._open[code] = {line for _, _, line in code.co_lines() if line} if inside else None
        return self._line if self._open[code] else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        code = frame.f_code
        left = self._open[code]
        if event == "line" and left is not None and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            self._seen.setdefault(code.co_filename.removeprefix(self._folder), set()).add(frame.f_lineno)
        return self._line if left else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReach:
    """What the first schedules of a cell ran. lines: by file and line, a bit for each schedule that ran it.

    costs: events of each schedule, which measures its length on every machine alike. cpu_s: CPU seconds, traced.
    """

    cell: str
    line: str
    costs: tuple[int, ...]
    cpu_s: tuple[float, ...]
    lines: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def schedules(self) -> int:
        """How many schedules were traced."""
        return len(self.costs)

    @property
    def cost(self) -> float:
        """Events of a schedule, on average."""
        return sum(self.costs) / len(self.costs)

    def bits(self, file: str, first: int, last: int) -> int:
        """The schedules that run one of these lines, a bit each. Lines 0 to 0: any line of the file."""
        lines = self.lines.get(file, {})
        found = 0
        for line, bits in lines.items():
            if not last or first <= line <= last:
                found |= bits
        return found


@dataclass(frozen=True, slots=True)
class Reach:
    """What all cells of a run reach."""

    cells: Sequence[CellReach]

    def of(self, file: str, first: int, last: int) -> dict[str, int]:
        """Cell -> its schedules that reach these lines. A file outside functions alone is reached by all."""
        found = {each.cell: each.bits(file, first, last) for each in self.cells}
        reached = {cell: bits for cell, bits in found.items() if bits}
        if not last and not any(file in each.lines for each in self.cells):
            return {each.cell: (1 << each.schedules) - 1 for each in self.cells}
        return reached

    def runs(self, reached: Mapping[str, int], schedules: int) -> list[tuple[str, int]]:
        """(cell, schedule) in the order of their worth: cells that are cheap and hit often come first and more often.

        A traced schedule that misses the lines is left out: it would run as ever.
        """
        ranked = []
        for at, each in enumerate(self.cells):
            bits = reached.get(each.cell, 0)
            if not bits:
                continue
            weight = (each.cost * each.schedules / bits.bit_count()) ** 0.5
            turn = 0
            for number in range(schedules):
                if number >= each.schedules or bits >> number & 1:
                    turn += 1
                    ranked.append((turn * weight, at, number))
        return [(self.cells[at].cell, number) for _, at, number in sorted(ranked)]
