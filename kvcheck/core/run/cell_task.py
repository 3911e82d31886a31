"""CellTask and Report: input and output of a process that runs cells, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.run.plan import Plan

DIED = "died"
"""Fact of a finding whose schedule ended its process: such a schedule is not repeated automatically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """A cell to run: its first plan, the wanted number of schedules, and the least.

    before: evidence of an interrupted run, which this one continues. confirms: also run unordered operations of the
    first failing schedule in the other order. fails_on_conditional: a conditional finding ends the cell. within: run
    all schedules within so many answers, of `schedules` workloads; None: one of each. is_exercised: an earlier process
    had found all that a pass needs.
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
    """cpu_s: CPU seconds of each process; after them only cells below their floors continue. until: the
    time.monotonic() at which everything ends; all processes of a machine share that clock."""

    cpu_s: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one schedule, or the end of a cell (`evidence` is None).

    reason: why it cannot count as a pass. gap: evidence that the cell still lacks. divergence: of a replay from its
    recorded choices. cut: the schedule ended by the wall time limit. scope: the schedules explored completely.
    is_note_told: the terminal shows the note too. is_left: the cell goes on in another process; `reason` is then its
    gap. error: why its process stopped; ran: the line of the running schedule.
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
