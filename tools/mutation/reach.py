"""Reach: which lines of the cache each schedule of a cell runs, in the code as it is.

Invariants:
- Reference runs do not count.
- Lines outside functions run at the import, so every schedule of a cell that runs anything of their file reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReach:
    """Lines that the first schedules of a cell run. lines: by file and line, a bit for each schedule.

    costs: events of each schedule, which measures its length on every machine alike. cpu_s: its CPU seconds.
    """

    cell: str
    costs: Sequence[int]
    cpu_s: Sequence[float]
    lines: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def schedules(self) -> int:
        return len(self.costs)

    @property
    def all_bits(self) -> int:
        return (1 << self.schedules) - 1

    @property
    def cost(self) -> float:
        return sum(self.costs) / len(self.costs)

    def bits(self, file: str, first: int, last: int) -> int:
        """The schedules that run one of these lines, a bit each. Lines 0 to 0: any line of the file."""
        found = 0
        for line, bits in self.lines.get(file, {}).items():
            if not last or first <= line <= last:
                found |= bits
        return found


@dataclass(frozen=True, slots=True)
class Reach:
    cells: Sequence[CellReach]

    def of(self, file: str, first: int, last: int) -> dict[str, int]:
        """Cell -> its schedules that reach these lines. A file outside functions alone is reached by all."""
        found = {each.cell: each.bits(file, first, last) for each in self.cells}
        reached = {cell: bits for cell, bits in found.items() if bits}
        if not last and not any(file in each.lines for each in self.cells):
            return {each.cell: each.all_bits for each in self.cells}
        return reached

    def runs(self, reached: Mapping[str, int], schedules: int, *, floor: int = 1) -> list[tuple[str, int]]:
        """(cell, schedule) in the order of their worth: cells that are cheap and hit often come first and more often.

        A traced schedule that misses the lines is left out: the edit changes nothing in it. floor: cells begin at
        different ones of so many first schedules, which every default run has. So a few runs have all that those try:
        the audit is in the third.
        """
        ranked = []
        for at, each in enumerate(self.cells):
            bits = reached.get(each.cell, 0)
            if not bits:
                continue
            weight = (each.cost * each.schedules / bits.bit_count()) ** 0.5
            numbers = [number for number in range(schedules) if number >= each.schedules or bits >> number & 1]
            begin = at % max(1, min(floor, len(numbers)))
            numbers = numbers[begin:floor] + numbers[:begin] + numbers[floor:]
            ranked += [(turn * weight, at, number) for turn, number in enumerate(numbers, 1)]
        return [(self.cells[at].cell, number) for _, at, number in sorted(ranked)]
