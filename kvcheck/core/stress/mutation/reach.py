"""Reach: which statements of the cache each schedule of a cell begins, in the code as it is.

Invariants:
- A statement counts for a schedule exactly if that schedule begins it, by its first line. Reference runs do not count.
- Counting changes nothing else: each statement of a function first notes its line, in a module that is compiled so.
- Lines outside functions run at the import, so every schedule of a cell that runs anything of their file reaches them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SEEN: dict[str, set[int]] = {}
_NAME = "_seen_lines_"


def seen_in(file: str) -> set[int]:
    """The lines of a file that were noted since the last `taken`."""
    return _SEEN.setdefault(file, set())


def taken() -> dict[str, list[int]]:
    """All lines that were noted, by file; and begin anew."""
    found = {file: sorted(lines) for file, lines in _SEEN.items() if lines}
    for lines in _SEEN.values():
        lines.clear()
    return found


def counted(tree: ast.Module, file: str) -> ast.Module:
    """The module with each statement of its functions behind a note of its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _note_in(node)
    head = ast.parse(f"from {__name__} import seen_in as {_NAME}of\n{_NAME} = {_NAME}of({file!r})").body
    at = sum(_is_head(each) for each in tree.body)
    tree.body[at:at] = head
    return ast.fix_missing_locations(tree)


def _note_in(node: ast.AST) -> None:
    """Put notes into every block of a node, but not into functions inside it, which have their own turn."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        noted: list[ast.AST] = []
        for each in block:
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if isinstance(each, ast.stmt) and not is_text:
                noted.append(ast.copy_location(ast.parse(f"{_NAME}.add({each.lineno})").body[0], each))
            noted.append(each)
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _note_in(each)
        setattr(node, name, noted)


def _is_head(node: ast.stmt) -> bool:
    """What has to stay at the top of a module."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReach:
    """What the first schedules of a cell ran. lines: by file and first line of a statement, a bit for each schedule.

    costs: events of each schedule, which measures its length on every machine alike. cpu_s: its CPU seconds.
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

    def runs(self, reached: Mapping[str, int], schedules: int, *, floor: int = 1) -> list[tuple[str, int]]:
        """(cell, schedule) in the order of their worth: cells that are cheap and hit often come first and more often.

        A traced schedule that misses the lines is left out: it would run as ever. floor: cells begin at different ones
        of so many first schedules, which every default run has. Then few runs meet all of what those try: the audit is
        in the third.
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
