"""One arm of kill_table.py, a child that runs the order of schedules of a default run until it finds a mutant.

It imports the kvcheck of its PYTHONPATH, which may be an older tree: what differs there is in `Tree`. It reads a name a
line and answers with JSON. Cells of other scenarios than the mutant's are not run: they are charged what a schedule of
theirs takes on the fixed build, measured once. So a mutant that such a cell finds counts as not
found there.

Invariants:
- seconds: CPU seconds of the process that finds it, of PROCESSES that share the cells as a default run deals them out.
- A mutant that no process finds within CAP_CPU_S has no seconds. Conditional findings do not count.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

PROCESSES = 2
RUN_CPU_S = 55.0
"""CPU seconds of each process, in both arms."""
CAP_CPU_S = 25.0
"""CPU seconds after which a mutant counts as not found. The time that cells share stays RUN_CPU_S, in both arms."""
SCHEDULES = 24
KIN = {
    "hicache": ("hicache", "hicache-hybrid"),
    "hicache-hybrid": ("hicache", "hicache-hybrid"),
    "pd-transfer": ("pd-transfer", "nvlink-aux"),
    "nvlink-aux": ("pd-transfer", "nvlink-aux"),
    "retract-resume": ("retract-resume",),
}
"""Scenarios that run for a mutant, by that of its card."""
OLD_ORDERS = ("eager", "lazy", *("delay",) * 9)
"""The portfolio before, up to the random orders."""
TINY = "-tiny"


class Tree:
    """What the kvcheck of this process calls things."""

    def __init__(self) -> None:
        try:
            self.runner = importlib.import_module("kvcheck.core.stress.runner").ScheduleRunner
            self.is_old = False
        except ModuleNotFoundError:
            self.runner = importlib.import_module("kvcheck.core.stress.engine").StressEngine
            self.is_old = True
        self.mutants = importlib.import_module("kvcheck.core.targets.mutants")
        self.target = importlib.import_module("kvcheck.core.targets.builtin").BuiltinTarget
        self.plan = importlib.import_module("kvcheck.core.stress.schedule").Plan

    def cells(self, seed: int, *, tiny_alone: bool) -> list[Any]:
        """The first plans of the cells of a default run."""
        if self.is_old:
            stress = importlib.import_module("kvcheck.commands.stress")
            return list(stress._cells(self.plan(scenario="", shape="", seed=seed), [], []))
        rows = importlib.import_module("kvcheck.core.stress.runner_rows").RUNNERS
        kind = importlib.import_module("kvcheck.core.stress.schedule").Kind.SCHEDULE
        found = rows[kind].cells(self.plan(scenario="", seed=seed), (), ())
        return [each for each in found if each.shape.endswith(TINY) or not tiny_alone]


Cost = Callable[[Any], float]
"""CPU seconds of one schedule of a plan; raises Found."""


class Found(Exception):
    """The mutant was found by this schedule."""


def before(cells: Sequence[Any], share_s: float, cost: Cost, *, is_old: bool) -> Iterator[float]:
    """Cell after cell, each for its share of the time. Yields what each schedule took."""
    for cell in cells:
        spent = last = 0.0
        for number in range(SCHEDULES):
            if spent + (last / 2 if number > 1 else 0.0) > share_s:
                break
            plan = replace(cell, schedule=number)
            if not is_old:
                plan = replace(plan, strategy=OLD_ORDERS[number] if number < len(OLD_ORDERS) else "random")
            last = cost(plan)
            spent += last
            yield last


def after(cells: Sequence[Any], cost: Cost) -> Iterator[float]:
    """As cells take turns in this tree, by its own code. Yields what each schedule took."""
    turns = importlib.import_module("kvcheck.core.stress.turns")
    tasks = importlib.import_module("kvcheck.core.stress.cell_task")
    record = importlib.import_module("kvcheck.core.base.record")
    outcome = importlib.import_module("kvcheck.core.stress.runner").Outcome
    coverage = importlib.import_module("kvcheck.core.stress.coverage")

    class Charged:
        """A runner whose schedules take what `cost` says. Its own CPU time is taken off what Turns measures."""

        cpu_s = 0.0
        took = 0.0

        def run(self, plan: Any) -> Any:
            began = time.process_time()
            self.took = cost(plan)
            self.cpu_s += self.took - (time.process_time() - began)  # what is charged, and not measured twice
            return outcome(plan=plan, findings=(), evidence=record.Evidence(schedules=1), digest=0)

        def gap(self, plan: Any, total: Any) -> None:
            return None

        def closing(self) -> None:
            return None

    runner = Charged()
    share = [
        (at, tasks.CellTask(plan=each, schedules=SCHEDULES, floor=coverage.floor_of(each, wanted=SCHEDULES)))
        for at, each in enumerate(cells)
    ]
    for report in turns.take_turns(share, tasks.Limit(cpu_s=RUN_CPU_S), lambda plan: None, runner):
        if report.evidence is not None:
            yield runner.took


class Arm:
    """policy: "before" or "after"."""

    def __init__(self, policy: str, seed: int) -> None:
        self._tree, self._policy, self._seed = Tree(), policy, seed
        self._cells = self._tree.cells(seed, tiny_alone=policy == "before")
        self._fixed = self._tree.runner(self._tree.target())
        self._costs: dict[str, float] = {}

    def _usual(self, plan: Any) -> float:
        """CPU seconds of the first schedule of the plan's cell on the fixed build."""
        if plan.cell not in self._costs:
            began = time.process_time()
            self._fixed.run(replace(plan, schedule=0))
            self._costs[plan.cell] = time.process_time() - began
        return self._costs[plan.cell]

    def row(self, name: str) -> dict[str, object]:
        """What came of one mutant."""
        if name not in self._tree.mutants.MUTANTS:
            return {"name": name, "known": False}
        card = self._tree.mutants.mutant(name)
        runner = self._tree.runner(self._tree.mutants.mutant_target(name))
        said: dict[str, object] = {"name": name, "known": True, "seconds": None, "line": "", "schedules": 0}
        ran = 0
        line = ""

        def cost(plan: Any) -> float:
            nonlocal ran, line
            ran += 1
            if plan.scenario not in KIN[card.scenario]:
                return self._usual(plan)
            began = time.process_time()
            outcome = runner.run(replace(plan, mutant=name))
            took = time.process_time() - began
            if any(getattr(each, "condition", None) is None for each in outcome.findings):
                line = plan.line()
                raise Found(took)
            return took

        shares = [self._cells[at::PROCESSES] for at in range(PROCESSES)]
        shares.sort(key=lambda share: all(each.shape != card.shape or each.scenario != card.scenario for each in share))
        least = None
        for share in shares:
            clock, ran = 0.0, 0
            try:
                for took in self._order(share, cost):
                    clock += took
                    if clock >= min(CAP_CPU_S, least or CAP_CPU_S):
                        break
            except Found as found:
                clock += found.args[0]
                if clock < min(CAP_CPU_S, least or CAP_CPU_S):
                    least = clock
                    said |= {"seconds": round(clock, 2), "line": line, "schedules": ran}
        return said

    def _order(self, share: Sequence[Any], cost: Cost) -> Iterator[float]:
        if self._policy == "after":
            return after(share, cost)
        return before(share, RUN_CPU_S * PROCESSES / len(self._cells), cost, is_old=self._tree.is_old)


def main() -> None:
    """Answer names until the input ends."""
    arm = Arm(sys.argv[1], int(sys.argv[2]))
    for text in sys.stdin:
        sys.stdout.write(json.dumps(arm.row(text.strip())) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
