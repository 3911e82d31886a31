"""Line map: which files of an engine, and which of their lines, a schedule of each cell runs. It is measured once.

Invariants:
- A row is stale once a file that it ran has changed. It is measured again, the others stay. Another kvcheck has a map
  of its own.
- A cell whose child was lost has no row, and may run any file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import code_digest, file_digest
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.probes.frame.lines_run import as_ranges, from_ranges
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.probes.runner import ProbeRunner
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.store import write_text

WHOLE = ("",)


@dataclass(frozen=True, slots=True)
class FileRun:
    """digest: of the file when it was measured. lines: as ranges."""

    digest: str
    lines: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMap:
    """cells: file -> its lines, by cell. Files are relative to the package."""

    kvcheck: str
    target: str
    cells: dict[str, dict[str, FileRun]] = field(default_factory=dict)

    def runs(self, cell: str, files: Collection[str]) -> int:
        """Return how many lines of these files the cell ran; 1 if that is not known."""
        row = self.cells.get(cell)
        return 1 if row is None else sum(len(from_ranges(row[name].lines)) for name in files if name in row)

    def stale(self, folder: Path, plans: Sequence[Plan], but: Collection[str]) -> list[Plan]:
        """Return plans whose row is missing, or ran a file that has changed. but: files whose changes are known."""
        digest = cache(lambda name: _digest(folder / name))
        return [
            plan
            for plan in plans
            if (row := self.cells.get(plan.cell)) is None
            or any(run.digest != digest(name) for name, run in row.items() if name not in but)
        ]

    def measured(self, runner: ProbeRunner, plans: Sequence[Plan], progress: Callable[[str], None]) -> LineMap:
        """Run a schedule of each plan with all lines traced, and return the map with their rows."""
        folder, cells = Path(runner.start().folder or ""), dict(self.cells)
        digest = cache(lambda name: _digest(folder / name))
        runner.traced = WHOLE
        for number, plan in enumerate(plans):
            progress(f"measuring lines: {number} of {len(plans)} cells")
            cells.pop(plan.cell, None)
            if not runner.run(plan).is_lost:
                cells[plan.cell] = {
                    name: FileRun(digest(name), as_ranges(lines)) for name, lines in runner.ran[plan.cell].items()
                }
        runner.traced = ()
        runner.ran.clear()
        return replace(self, cells=cells)

    def save(self, file: Path) -> None:
        write_text(
            file, json.dumps(to_plain(self)) + "\n", elsewhere="set XDG_CACHE_HOME to a folder that can be written"
        )


def file_of(folder: Path, target: str, device: str) -> Path:
    """Return the place of a target's map. folder: of all maps."""
    found = parse_target(target)
    name = hashlib.sha256(f"{found.python} {kind_of(device)}".encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{found.engine}-{name[:12]}.json"


def load(file: Path, target: str) -> LineMap:
    """Return the map of this kvcheck; one without rows if there is none that can be read."""
    try:
        found: LineMap = value_from(LineMap, json.loads(file.read_text(encoding="utf-8")), file.name)
        for row in found.cells.values():
            for run in row.values():
                from_ranges(run.lines)
    except (OSError, ValueError, RecursionError):
        found = LineMap(kvcheck="", target=target)
    return found if found.kvcheck == code_digest() else LineMap(kvcheck=code_digest(), target=target)


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except UsageError:  # it was removed
        return ""
