"""Session: a run in progress. It takes outcomes, keeps the record on disk current, and prints to the terminal.

Invariants:
- run.json is complete JSON after every schedule, with `complete` false until the end.
- A save that fails does not end the run: findings stay, `is_saved` is false, and a warning says why.
- A cell that judged nothing, or not enough, is UNKNOWN with the reason and what would change it. One that has run what
  a pass takes is a PASS, whatever ends it.
- Results go to stdout, progress to stderr; with --format json stdout is the record and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from kvcheck.commands.options import environment, identity, new_run_id, tool
from kvcheck.commands.terminal import WRITING, ProgressLine, clear_passing, say, warn
from kvcheck.core.base.cells import is_engine, keys_of, lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import (
    BenchRow,
    Coverage,
    Evidence,
    Finding,
    MutantResult,
    RunRecord,
    ScenarioResult,
    Verdict,
    to_plain,
)
from kvcheck.core.base.scratch import sweep
from kvcheck.core.report.gate.baseline import LEFT_OUT
from kvcheck.core.report.store import RunStore
from kvcheck.core.stress.schedule import BUILTIN, Plan

MAX_CAUSES_KEPT = 100
MAX_SYMPTOMS_KEPT = 200
"""Of all cells together. A cell that fails late still has its cause in the record."""

STOPPED = "stopped before the cell was finished"

TICK_S = 1.0
"""Seconds between two looks at the clock of the progress line."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One scenario with one shape, while it runs.

    plan: its first plan. wanted: schedules planned. floor: how many a pass needs. ran: numbers of the schedules that
    have run. earlier: what the schedules of an interrupted run tried. findings: those that fail it. is_exercised: all
    that a pass needs has happened. told: how many of its findings its printed line covers; None: there is none yet.
    notes: what is printed before that line. within: run all schedules within so many answers, of `wanted` workloads.
    scope: of which schedules none was left out.
    """

    plan: Plan
    wanted: int
    floor: int
    fails_on_conditional: bool = False
    evidence: Evidence = field(default_factory=Evidence)
    findings: int = 0
    ran: list[int] = field(default_factory=list)
    earlier: tuple[str, ...] = ()
    duration_s: float = 0.0
    reason: str | None = None
    is_done: bool = False
    is_exercised: bool = False
    told: int | None = None
    notes: list[str] = field(default_factory=list)
    within: int | None = None
    scope: str | None = None
    _coverage: tuple[int, Coverage] | None = None

    @property
    def id(self) -> str:
        """The id of its row in the record."""
        return self.plan.cell

    @property
    def is_enough(self) -> bool:
        """A pass takes no more than has run."""
        return self.is_exercised and self.shortfall(None) is None

    def add(self, findings: tuple[Finding, ...], evidence: Evidence, duration_s: float) -> None:
        """One judged schedule."""
        self.evidence = self.evidence.plus(evidence)
        self.duration_s += duration_s
        self.findings += sum(each.condition is None or self.fails_on_conditional for each in findings)

    def take_over(self, row: ScenarioResult, findings: int) -> None:
        """Continue an interrupted run: a cell that it could not judge starts anew, and a pass that has schedules left
        goes on."""
        if row.verdict is Verdict.UNKNOWN and (row.reason != STOPPED or self.within is not None):
            return
        self.evidence, self.duration_s = row.evidence, row.duration_s
        if row.coverage is not None:
            self.earlier, self.scope = row.coverage.tried, row.coverage.scope
        self.findings = max(1, findings) if row.verdict is Verdict.FAIL else 0
        self.is_exercised = row.verdict is Verdict.PASS
        is_whole = self.within is not None or row.schedules >= self.wanted
        self.is_done = row.verdict is Verdict.FAIL or (self.is_enough and is_whole)

    def coverage(self) -> Coverage:
        """How much of what was planned it has run."""
        from kvcheck.core.stress.coverage import coverage

        if self._coverage is None or self._coverage[0] != len(self.ran):
            found = coverage(self.plan, wanted=self.wanted, floor=self.floor, ran=self.ran, earlier=self.earlier)
            self._coverage = len(self.ran), found
        if self.within is None:
            return self._coverage[1]
        return replace(self._coverage[1], wanted=max(self.wanted, self.evidence.schedules), scope=self.scope)

    def shortfall(self, cut: str | None) -> str | None:
        """Why it has run too little for a pass, and what ended it; None if it has run enough or has failed."""
        from kvcheck.core.stress.coverage import shortfall

        if self.findings:
            return None
        why = shortfall(self.plan, self.coverage(), ran=self.evidence.schedules)
        if cut is None and self.wanted < self.floor:
            cut = f"use --schedules {self.floor} or more"
        return why and f"{why}: {cut or 'its time was up; use a larger --max-time'}"

    def result(self) -> ScenarioResult:
        """The cell's row of the record, as of now."""
        verdict, code = Verdict.PASS, None
        if self.findings:
            verdict = Verdict.FAIL
        elif not self.evidence.schedules or self.reason or not (self.is_done or self.is_enough):
            verdict, code = Verdict.UNKNOWN, "KV990"
        reason = self.reason or (None if self.is_done or self.findings else STOPPED)
        if self.findings and reason is not None:
            reason = f"it fails, and not all of it was judged: {reason}"
        return ScenarioResult(
            id=self.id,
            shape=self.plan.tried_with,
            verdict=verdict,
            code=code,
            reason=None if verdict is Verdict.PASS else reason,
            schedules=self.evidence.schedules,
            duration_s=round(self.duration_s, 3),
            evidence=self.evidence,
            coverage=self.coverage(),
        )


class Session:
    """Builds one RunRecord and saves it as it grows.

    results: rows that belong to no cell. facts: what a command adds to the environment. repro: the command that repeats
    the run; resumes: with --resume that command continues it. quiet: only JSON goes to stdout. identity: digests of
    kvcheck's code and of what a command adds.
    """

    def __init__(
        self,
        *,
        argv: list[str],
        repro: str,
        seed: int | None,
        plan: Mapping[str, object],
        out: Path,
        quiet: bool,
        resumes: bool = False,
    ) -> None:
        self.cells: dict[str, Cell] = {}
        self.findings: list[Finding] = []
        self.left_out = 0
        self.mutants: list[MutantResult] = []
        self.bench: list[BenchRow] = []
        self.results: list[ScenarioResult] = []
        self.facts: dict[str, object] = {}
        self.identity = identity()
        self.warnings: list[str] = []
        self.is_saved = False
        self._line = ProgressLine()
        self._text = ""
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._argv, self.repro, self._seed, self.plan = argv, repro, seed, dict(plan)
        self.resumes = resumes
        self._quiet = quiet
        sweep()  # folders of runs that were killed
        self._environment = environment()
        self._store = RunStore(out)
        self.run_id = self._store.claim(new_run_id)
        self.folder = out / self.run_id

    def withdraw(self) -> None:
        """Remove this run's folder, of a run that was refused before it began; one that holds something is left."""
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    @property
    def is_of_own_target(self) -> bool:
        """Whether code of the user's own runs in it."""
        targets = [keys_of(line).get("target", BUILTIN) for line in lines_of(self.plan)]
        return any(target != BUILTIN and not is_engine(target) for target in targets)

    @property
    def version(self) -> str:
        """kvcheck's version."""
        return tool()["version"]

    @staticmethod
    def cpus() -> int:
        """Cores this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def elapsed_s(self) -> float:
        """Seconds since the session began."""
        return self._line.elapsed_s

    def add(self, cell: Cell, findings: tuple[Finding, ...], evidence: Evidence, duration_s: float) -> None:
        """One judged schedule of a cell."""
        cell.add(findings, evidence, duration_s)
        self.keep(findings)
        self.save(complete=False)
        done = sum(each.is_done for each in self.cells.values())
        cells = f"{done} of {counted(len(self.cells), 'cell')}"
        self.progress(f"{self._ran()}, {cells}{self._left()}, now {cell.id}")

    def _ran(self) -> str:
        """How many schedules ran, of how many: nobody knows the latter where cells explore workloads."""
        ran = sum(each.evidence.schedules for each in self.cells.values())
        if any(each.within is not None for each in self.cells.values()):
            return counted(ran, "schedule")
        return f"{ran} of {counted(sum(each.wanted for each in self.cells.values()), 'schedule')}"

    def _left(self) -> str:
        """How long the run may still take, where it was given a time."""
        most = self.plan.get("max_time_s")
        return f", {max(0.0, most - self.elapsed_s):.0f} s left" if isinstance(most, int | float) else ""

    def keep(self, findings: tuple[Finding, ...]) -> None:
        """Number findings as this run's own, so that `kvcheck replay RUN#N` finds them. Causes come before their
        symptoms; their ids are those of one schedule, or of the run that this one continues."""
        own: dict[str, str] = {}
        for finding in findings:
            symptoms = sum(each.cause is not None for each in self.findings)
            full = symptoms >= MAX_SYMPTOMS_KEPT if finding.cause else len(self.findings) - symptoms >= MAX_CAUSES_KEPT
            full = full and any(each.cell == finding.cell for each in self.findings)  # the first cause of a cell stays
            if full or (finding.cause is not None and finding.cause not in own):
                self.left_out += 1
                continue
            cause = None if finding.cause is None else own[finding.cause]
            kept = replace(finding, id=f"{self.run_id}.{len(self.findings) + 1}", cause=cause)
            own[finding.id] = kept.id
            self.findings.append(kept)

    def record(self, *, complete: bool, exit_code: int | None = None) -> RunRecord:
        """The record as of now."""
        results = (*(cell.result() for cell in self.cells.values()), *self.results)
        verdict = Verdict.worst([*(row.verdict for row in results), *(row.verdict for row in self.mutants)])
        evidence = Evidence(schedules=0)
        for row in results:
            evidence = evidence.plus(row.evidence)
        return RunRecord(
            run_id=self.run_id,
            tool=tool(),
            argv=tuple(self._argv),
            repro=self.repro,
            seed=self._seed,
            started_at=self._started_at,
            duration_s=round(self.elapsed_s, 3),
            verdict=verdict,
            exit_code=verdict.exit_code if exit_code is None else exit_code,
            complete=complete,
            environment={**self._environment, **self.facts},
            plan=self.plan,
            evidence=evidence,
            scenarios=results,
            findings=tuple(self.findings),
            bench=tuple(self.bench),
            mutants=tuple(self.mutants),
            warnings=(*self.warnings, *self._unkept()),
            identity=self.identity,
        )

    def _unkept(self) -> list[str]:
        return [f"{LEFT_OUT}: {self.left_out:,}"] if self.left_out else []

    def save(self, *, complete: bool, exit_code: int | None = None) -> RunRecord:
        """Write the record, whole or not at all. Returns the record, also where it could not be saved."""
        record = self.record(complete=complete, exit_code=exit_code)
        try:
            self._store.save(record)
        except UsageError as error:
            self.is_saved = False
            text = f"a save of the record failed: {error}"
            if text not in self.warnings:
                self.warnings.append(text)
                self.clear_progress()
                warn(text)
            return self.record(complete=complete, exit_code=exit_code)
        self.is_saved = True
        return record

    def progress(self, text: str) -> None:
        """Show what goes on, until the next text."""
        self._text = text
        self._tell()

    def _tell(self) -> None:
        """The line of progress, with the time as of now."""
        if self._text and not self._quiet:
            self._line.show(self._text)

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """The clock of the progress line goes on inside the block, also while nothing is reported."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(TICK_S):
                self._tell()

        thread = threading.Thread(target=tick, name="kvcheck clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def clear_progress(self) -> None:
        """Remove the progress line."""
        if not self._quiet:
            clear_passing()

    def say(self, text: str = "") -> None:
        """A line of results on stdout."""
        if not self._quiet:
            with WRITING:
                self.clear_progress()
                say(text)

    def print_json(self, record: RunRecord) -> None:
        """The record on stdout, when that is the format asked for."""
        if self._quiet:
            # In ASCII: the same JSON, whatever the encoding of stdout, and nothing that a terminal obeys.
            sys.stdout.write(json.dumps(to_plain(record), indent=1) + "\n")
            sys.stdout.flush()
