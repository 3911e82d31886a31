"""Pristine: what the code as it is does in each cell: the lines it reaches, its outputs, and that it passes.

Invariants:
- What is kept in a folder is read again only if code, plan and number of schedules are the same.
- A plan of the default run that fails on the code as it is ends the campaign: no mutant could be judged by it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvcheck.core.base.errors import InternalError, UnknownVerdict
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.mutation.pool import ServerPool
from kvcheck.core.stress.mutation.reach import CellReach, Reach
from kvcheck.core.stress.mutation.trial import SURVEY_CPU_S, file_of
from kvcheck.core.stress.rows import SCHEDULE

JUDGING = ("core/base", "core/cache", "core/stress", "core/stress/targets", "core/stress/workload", "kernels")
"""What a verdict depends on, below the package's folder."""
OWN = "core/stress/mutation"


def code_of(folder: Path) -> str:
    """A digest of all that a verdict depends on, this package apart."""
    found = hashlib.sha256()
    for part in JUDGING:
        for path in sorted((folder / part).rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if not name.startswith(f"{OWN}/"):
                found.update(f"{name} {path.stat().st_size} ".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cells_of(seed: int, scenarios: Sequence[str] = (), shapes: Sequence[str] = ()) -> list[Plan]:
    """The first plans of the cells of a default run, simulated; none named: all. Raises UsageError."""
    return SCHEDULE.cells(Plan(scenario="", seed=seed), scenarios, shapes)


class Pristine:
    """What is known of the code as it is, in a folder with a file for each cell."""

    def __init__(self, folder: Path, cells: Sequence[Plan], *, code: str, schedules: int, traced: int) -> None:
        self.folder = folder
        self._key = f"3 {code} schedules {schedules} traced {traced}"
        self._cells = {plan.cell: plan for plan in cells}
        self._schedules, self._traced = schedules, min(traced, schedules)

    def survey(self, pool: ServerPool) -> Iterator[str]:
        """Trace the cells that the folder does not know yet; yields each cell when it is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left = [plan for plan in self._cells.values() if self._read(plan) is None]
        orders = iter(
            {
                "number": number,
                "kind": "survey",
                "texts": {},
                "line": plan.line(),
                "schedules": self._schedules,
                "traced": self._traced,
                "most_cpu_s": SURVEY_CPU_S,
            }
            for number, plan in enumerate(left)
        )
        for answer in pool.answers(lambda: next(orders, None)):
            plan, said = left[answer.number], answer.said
            if said.get("clean") is False:
                raise UnknownVerdict(
                    f"the code as it is fails {said['line']}: {said['kinds']}; a mutant cannot be judged by it. "
                    f"next: kvcheck replay {said['line']}"
                )
            if "lines" not in said:
                raise InternalError(f"the survey of {plan.cell} ended with status {answer.ended}: {said or answer.at}")
            text = json.dumps({"key": self._key, **{k: v for k, v in said.items() if k != "number"}})
            (self.folder / file_of(plan.cell)).write_text(text, encoding="utf-8")
            yield plan.cell

    def reach(self) -> Reach:
        """What the cells reach; all have been surveyed."""
        return Reach([_reach_of(self._known(plan)) for plan in self._cells.values()])

    def plan(self, cell: str, schedule: int) -> Plan:
        """A plan of the default run."""
        return dataclasses.replace(self._cells[cell], schedule=schedule)

    @property
    def traced(self) -> int:
        """Schedules of each cell that were run on the code as it is, and passed."""
        return self._traced

    def _known(self, plan: Plan) -> Mapping[str, object]:
        value = self._read(plan)
        if value is None:
            raise InternalError(f"{plan.cell} was not surveyed")
        return value

    def _read(self, plan: Plan) -> Mapping[str, object] | None:
        path = self.folder / file_of(plan.cell)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_same = isinstance(value, dict) and value.get("key") == self._key and value.get("line") == plan.line()
        return value if is_same else None


def _reach_of(value: Mapping[str, object]) -> CellReach:
    lines: Mapping[str, Mapping[str, int]] = value["lines"]  # type: ignore[assignment]
    costs: Sequence[int] = value["costs"]  # type: ignore[assignment]
    cpu_s: Sequence[float] = value["cpu_s"]  # type: ignore[assignment]
    return CellReach(
        cell=str(value["cell"]),
        line=str(value["line"]),
        costs=tuple(costs),
        cpu_s=tuple(cpu_s),
        lines={file: {int(line): bits for line, bits in row.items()} for file, row in lines.items()},
    )
