"""Survey: the code as it is in each cell: the lines that it reaches, its outputs, its evidence, and that it passes.

Invariants:
- A file of the folder is read again only if code, plan and number of schedules are the same.
- A plan of the default run that fails on the code as it is ends the campaign: no edit could be judged by it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcheck.core.base.errors import InternalError, UnknownVerdict
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.rows import SCHEDULE
from tools.mutation.edits import PACKAGE
from tools.mutation.forks import Forks, Order
from tools.mutation.reach import CellReach, Reach

JUDGING = ("kernels", "core")
"""All that a verdict may depend on, below the package's folder."""
SURVEY_CPU_S = 600.0


def code_of(package: Path = PACKAGE) -> str:
    found = hashlib.sha256()
    for part in JUDGING:
        for path in sorted((package / part).rglob("*.py")):
            found.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size} ".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cells_of(seed: int, scenarios: Sequence[str] = (), shapes: Sequence[str] = ()) -> list[Plan]:
    """The first plans of the cells of a default run, simulated; none named: all. Raises UsageError."""
    return SCHEDULE.cells(Plan(scenario="", seed=seed), scenarios, shapes)


class Survey:
    """Facts about the code as it is, in a folder with a file for each cell."""

    def __init__(self, folder: Path, cells: Sequence[Plan], *, code: str, schedules: int, traced: int) -> None:
        self.traced = min(traced, schedules)
        """Schedules of each cell that were run on the code as it is, and passed."""
        self._folder, self._schedules = folder, schedules
        self._key = f"4 {code} schedules {schedules} traced {traced}"
        self._cells = {plan.cell: plan for plan in cells}

    def run(self, forks: Forks) -> Iterator[str]:
        """Trace the cells that the folder does not have yet; yields each cell when it is done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        orders = iter([self._order(plan) for plan in self._cells.values() if self._read(plan) is None])
        for order, answer in forks.answers(lambda: next(orders, None)):
            said, plan = answer.said, order.about
            assert isinstance(plan, Plan)
            if said.get("clean") is False:
                raise UnknownVerdict(
                    f"the code as it is fails {said['line']}: {said['kinds']}; an edit cannot be judged by it. "
                    f"next: kvcheck replay {said['line']}"
                )
            if "lines" not in said:
                raise InternalError(f"the survey of {plan.cell} ended with status {answer.ended}: {said or answer.at}")
            self._file(plan).write_text(json.dumps({"key": self._key, **said}), encoding="utf-8")
            yield plan.cell

    def cells(self) -> dict[str, dict[str, Any]]:
        found = {cell: self._read(plan) for cell, plan in self._cells.items()}
        if missing := [cell for cell, value in found.items() if value is None]:
            raise InternalError(f"{', '.join(missing)}: expected a cell that was surveyed")
        return {cell: value for cell, value in found.items() if value is not None}

    def plan(self, cell: str, schedule: int) -> Plan:
        return dataclasses.replace(self._cells[cell], schedule=schedule)

    def has(self, plan: Plan) -> bool:
        """Whether a plan is one of this run's. Others have workloads whose outputs are not known."""
        is_known = plan.cell in self._cells and plan.schedule < self._schedules
        return is_known and plan == self.plan(plan.cell, plan.schedule)

    def _order(self, plan: Plan) -> Order:
        arguments = {"line": plan.line(), "traced": self.traced, "schedules": self._schedules}
        return Order(about=plan, work="survey", arguments=arguments, most_cpu_s=SURVEY_CPU_S)

    def _file(self, plan: Plan) -> Path:
        return self._folder / f"{plan.cell.replace('/', '+')}.json"

    def _read(self, plan: Plan) -> dict[str, Any] | None:
        try:
            value = json.loads(self._file(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_same = isinstance(value, dict) and value.get("key") == self._key and value.get("line") == plan.line()
        return value if is_same else None


def reach_of(cells: Mapping[str, Mapping[str, Any]]) -> Reach:
    return Reach(
        [
            CellReach(
                cell=cell,
                costs=value["costs"],
                cpu_s=value["cpu_s"],
                lines={file: {int(line): bits for line, bits in row.items()} for file, row in value["lines"].items()},
            )
            for cell, value in cells.items()
        ]
    )
