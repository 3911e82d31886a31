"""RUNNERS: the table of subjects, and of ways to run them. The first row that takes a plan runs it.

Invariants:
- How subjects differ is stated in their rows, which lie with the subjects. Nothing in run/ names one.
- A row is imported when a plan is looked up. Importing this table loads no subject.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvcheck.core.base.record import Coverage, Finding
from kvcheck.core.base.registry import Registry
from kvcheck.core.run.outcome import Outcome, Runner, TargetOf
from kvcheck.core.run.plan import Plan


class RunnerRow(ABC):
    """How plans of one kind are checked, run and counted.

    floor: schedules that a pass needs. confirms: unordered operations can be run in the other order too. is_once: a run
    is one schedule. is_alone: cells never run at the same time. tells_notes: the terminal shows its notes too.
    opens_device: this process works on the plan's device.
    """

    floor: int = 1
    confirms: bool = False
    is_once: bool = False
    is_alone: bool = False
    tells_notes: bool = False
    opens_device: bool = False

    @abstractmethod
    def takes(self, plan: Plan) -> bool:
        """Whether a plan is of this kind; rows before this one have not taken it."""

    @abstractmethod
    def make(self, plan: Plan, target_of: TargetOf) -> Runner:
        """The runner of one cell."""

    @abstractmethod
    def check_names(self, plan: Plan) -> None:
        """Raise UsageError unless scenario and shape, or what stands for them, exist."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise UsageError for options that the runner does not read, and for a plan that lacks what it needs."""

    @abstractmethod
    def cells(self, base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
        """The plans of a run, made from one without scenario and shape. Raises UsageError where none is left."""

    def tried(self, plan: Plan) -> tuple[str, ...]:
        """What one schedule tries: its order, and the settings that its number picks, each as "kind:value"."""
        return ()

    def settings(self, plan: Plan) -> tuple[str, ...]:
        """All settings that schedules of a cell may pick."""
        return ()

    def left_out(self, plan: Plan) -> tuple[str, ...]:
        """The orders that no schedule of a plan's cell tries."""
        return ()

    def lacks(self, plan: Plan, found: Coverage) -> str | None:
        """Why what was tried is too little for a pass, however many schedules ran; None where it is enough."""
        return None

    def is_small(self, plan: Plan) -> bool:
        """Whether its schedules cost a fraction of the others', so that many of them come first."""
        return False

    def cost(self, plan: Plan) -> str:
        """The cost of a schedule, in words."""
        return "it had not answered"

    def shows(self, plan: Plan) -> str | None:
        """What a cell is about, where its name does not show that."""
        return None

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        """Lines of what no cell of a run exercises."""
        return []

    def confirmed(self, runner: Runner, outcome: Outcome, may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        """The findings of an outcome, confirmed by further runs where that is possible. may_go_on: asked before each
        run."""
        return outcome.findings


RUNNERS: Registry[RunnerRow] = Registry(
    "runner",
    {
        "probe": "kvcheck.core.probes.runner:PROBE",
        "ranks": "kvcheck.core.stress.ranks.row:RANKS",
        "delayed": "kvcheck.core.stress.rows:DELAYED",
        "schedule": "kvcheck.core.stress.rows:SCHEDULE",
    },
)


def row_of(plan: Plan) -> RunnerRow:
    """The row of the runner for a plan."""
    return next(row for name in RUNNERS.names() if (row := RUNNERS.load(name)).takes(plan))
