"""RUNNERS: the table of subjects and ways to run them. The first row that takes a plan runs it.

Invariants:
- Nothing in run/ names a subject: differences are in their rows.
- Importing this table loads no subject.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvcheck.core.base.record import Coverage, Finding
from kvcheck.core.base.registry import Registry
from kvcheck.core.run.outcome import Outcome, Runner, TargetOf
from kvcheck.core.run.plan import Plan


class RunnerRow(ABC):
    """floor: schedules for a pass. confirms: unordered operations can be run in the other order too. is_alone: cells
    never run at the same time. tells_notes: the terminal shows its notes too. opens_device: this process works on the
    plan's device."""

    floor: int = 1
    confirms: bool = False
    is_once: bool = False
    is_alone: bool = False
    tells_notes: bool = False
    opens_device: bool = False

    @abstractmethod
    def takes(self, plan: Plan) -> bool:
        """Whether a plan is of this kind; earlier rows have not taken it."""

    @abstractmethod
    def make(self, plan: Plan, target_of: TargetOf) -> Runner: ...

    @abstractmethod
    def check_names(self, plan: Plan) -> None:
        """Raise UsageError unless scenario and shape, or their equivalents, exist."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise UsageError for options without effect, and for an incomplete plan."""

    @abstractmethod
    def cells(self, base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
        """Make the plans of a run. Raises UsageError if none is left."""

    def tried(self, plan: Plan) -> tuple[str, ...]:
        """Order and settings of one schedule, each as "kind:value"."""
        return ()

    def settings(self, plan: Plan) -> tuple[str, ...]:
        return ()

    def left_out(self, plan: Plan) -> tuple[str, ...]:
        return ()

    def lacks(self, plan: Plan, found: Coverage) -> str | None:
        """Return why the coverage is too little for a pass with any number of schedules, or None."""
        return None

    def is_small(self, plan: Plan) -> bool:
        return False

    def cost(self, plan: Plan) -> str:
        return "it had not answered"

    def shows(self, plan: Plan) -> str | None:
        """The subject of a cell, if its name does not show it."""
        return None

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        """Lines about parts that no cell of a run exercises."""
        return []

    def confirmed(self, runner: Runner, outcome: Outcome, may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        """Return the findings, confirmed by further runs if possible. may_go_on: called before each."""
        return outcome.findings


RUNNERS: Registry[RunnerRow] = Registry(
    "runner",
    {
        "probe": "kvcheck.core.probes.runner:PROBE",
        "ranks": "kvcheck.core.stress.ranks.runner:RANKS",
        "delayed": "kvcheck.core.stress.rows:DELAYED",
        "schedule": "kvcheck.core.stress.rows:SCHEDULE",
    },
)


def row_of(plan: Plan) -> RunnerRow:
    return next(row for name in RUNNERS.names() if (row := RUNNERS.load(name)).takes(plan))
