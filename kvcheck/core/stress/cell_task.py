"""CellTask and Report: what a process that runs cells is asked, and what it answers after each schedule.

Invariants:
- Both travel between processes as JSON. Nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.stress.schedule import Plan

DIED = "died"
"""In what a finding adds: its schedule ended the process that ran it, so nothing runs it again by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """A cell to run: its first plan, how many schedules are wanted, and how many have to run at any cost.

    before: what an interrupted run has judged of the cell; this run continues after that. confirms: also run operations
    that the first failing schedule left unordered in the other order. fails_on_conditional: a conditional finding ends
    the cell. within: run all schedules within so many answers, of `schedules` workloads; None: one of each.
    is_exercised: a process that ran it before had found all that a pass needs.
    """

    plan: Plan
    schedules: int
    floor: int = 1
    before: Evidence = field(default_factory=Evidence)
    confirms: bool = False
    fails_on_conditional: bool = False
    within: int | None = None
    is_exercised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limits of a run. None: no limit.

    cpu_s: CPU seconds of each process that runs cells. After them only cells below their floors continue. until: the
    time.monotonic() at which everything ends. All processes of a machine share that clock.
    """

    cpu_s: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one schedule, or the end of a cell (`evidence` is None). reason: why it cannot count as a pass.

    schedule: its number. gap: what the cell has not exercised up to it. divergence: how a replay differed from its
    recorded choices. cut: what the limit of wall time ended. scope: of which schedules none was left out. note: a text
    for the record; is_note_told: the terminal shows it too. is_device_lost: its process can run no more schedules.
    left_cpu_s: what it leaves of its limit. is_left: the cell has not ended and goes on in another process; reason:
    what it has not exercised yet. error: why its process stopped; ran: the line of the schedule that it was running.
    """

    cell: int = 0
    schedule: int = 0
    findings: tuple[Finding, ...] = ()
    evidence: Evidence | None = None
    duration_s: float = 0.0
    reason: str | None = None
    gap: str | None = None
    divergence: str | None = None
    cut: str | None = None
    scope: str | None = None
    note: str | None = None
    is_note_told: bool = False
    is_device_lost: bool = False
    left_cpu_s: float | None = None
    is_left: bool = False
    error: str | None = None
    ran: str | None = None
    exit_code: int | None = None

    def line(self) -> str:
        return json.dumps(to_plain(self))
