"""CellTask: what a process that runs cells is asked; and Report: what it answers, a schedule at a time.

Invariants:
- Both are JSON between processes; nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.stress.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """A cell to run: its first plan, how many schedules, and how many of them whatever they cost.

    before: what an interrupted run has judged of the cell; this one goes on behind it. confirms: run what the first
    failing schedule left unordered in the other order too. fails_on_conditional: a conditional finding ends the cell.
    """

    plan: Plan
    schedules: int
    floor: int = 1
    before: Evidence = field(default_factory=Evidence)
    confirms: bool = False
    fails_on_conditional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a run may take; None: no limit.

    cpu_s: CPU seconds of each process that runs cells, after which only cells below their floors go on. until: the
    time.monotonic() at which everything ends; that clock is the same in all processes of a machine.
    """

    cpu_s: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One schedule's outcome, or the end of a cell (`evidence` None). reason: why it cannot count as a pass.

    schedule: its number. divergence: how a replay left its recorded choices. cut: what the limit of wall time ended.
    note: for the record; is_note_told: for the terminal too.
    """

    cell: int = 0
    schedule: int = 0
    findings: tuple[Finding, ...] = ()
    evidence: Evidence | None = None
    duration_s: float = 0.0
    reason: str | None = None
    divergence: str | None = None
    cut: str | None = None
    note: str | None = None
    is_note_told: bool = False
    error: str | None = None
    exit_code: int | None = None

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(to_plain(self))
