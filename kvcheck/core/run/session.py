"""Session: a run in progress. It collects results and keeps the record on disk current.

Invariants:
- run.json is complete JSON after every schedule, with `complete` false until the end.
- A failed save does not end the run: findings stay, and a warning has the reason.
- It reads no environment and writes to no terminal: a Teller does.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

from kvcheck import __version__
from kvcheck.core.base.cells import is_engine, keys_of, lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import MOONCAKE_BUILDS, code_digest
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import (
    LEFT_OUT,
    BenchRow,
    Evidence,
    Finding,
    Identity,
    MutantResult,
    RunRecord,
    ScenarioResult,
    Verdict,
)
from kvcheck.core.base.scratch import sweep
from kvcheck.core.run.cell import ScheduleCell
from kvcheck.core.run.plan import BUILTIN
from kvcheck.core.run.store import RunStore
from kvcheck.core.run.turns import Report

MAX_CAUSES_KEPT = 100
MAX_SYMPTOMS_KEPT = 200
"""Of all cells together. A cell that fails late still has its cause in the record."""

TICK_S = 1.0


class Teller(Protocol):
    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def detail(self, text: str) -> None:
        """Print what a reader of the whole screen does not need."""

    def progress(self, text: str, share: float | None = None) -> None:
        """share: of the run that is done, from 0 to 1."""

    def clear(self) -> None: ...

    def record(self, record: RunRecord) -> None:
        """Print the whole record at the end, for outputs that show it."""


class Session:
    """results: rows without a cell. untried: those warnings that the screen shows. facts: additions of
    a command to the environment. repro: the command that repeats the run. resumes: with --resume that command
    continues it. identity: digests of kvcheck's code and of a command's inputs."""

    def __init__(
        self,
        *,
        argv: list[str],
        repro: str,
        seed: int | None,
        plan: Mapping[str, object],
        out: Path,
        teller: Teller,
        resumes: bool = False,
    ) -> None:
        self.cells: dict[str, ScheduleCell] = {}
        self.findings: list[Finding] = []
        self.left_out = 0
        self.mutants: list[MutantResult] = []
        self.bench: list[BenchRow] = []
        self.results: list[ScenarioResult] = []
        self.facts: dict[str, object] = {}
        self.identity = Identity(code=code_digest())
        self.warnings: list[str] = []
        self.untried: list[str] = []
        self.is_saved = False
        self.teller = teller
        self._began = time.monotonic()
        self._text = ""
        self._spent: float | None = None
        self._done: float | None = None
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._argv, self.repro, self._seed, self.plan = argv, repro, seed, dict(plan)
        self.resumes = resumes
        sweep()  # folders of runs that were killed
        self._environment = environment()
        self._store = RunStore(out)
        self.run_id = self._store.claim(new_run_id)
        self.folder = out / self.run_id

    def withdraw(self) -> None:
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    @property
    def is_of_own_target(self) -> bool:
        targets = [keys_of(line).get("target", BUILTIN) for line in lines_of(self.plan)]
        return any(target != BUILTIN and not is_engine(target) for target in targets)

    @property
    def version(self) -> str:
        return tool()["version"]

    @staticmethod
    def cpus() -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def add(self, cell: ScheduleCell, findings: tuple[Finding, ...], evidence: Evidence, duration_s: float) -> None:
        cell.add(findings, evidence, duration_s)
        self._added(cell, findings)

    def take(self, cell: ScheduleCell, report: Report) -> None:
        cell.take(report)
        if report.evidence is None:
            self.save(complete=False)
        else:
            self._spent = report.spent
            self._added(cell, report.findings)

    def _added(self, cell: ScheduleCell, findings: tuple[Finding, ...]) -> None:
        self.keep(findings)
        self.save(complete=False)
        self.progress(self._work(cell), self._share())

    def _work(self, cell: ScheduleCell) -> str:
        judged = sum(each.is_done or each.is_enough for each in self.cells.values())
        ran = sum(each.evidence.schedules for each in self.cells.values())
        found = counted(len(self.findings), "finding")
        cells = f"{judged} of {counted(len(self.cells), 'cell')} judged"
        return f"{found}, {cells}, {counted(ran, 'schedule')}, now {cell.id}"

    def _share(self) -> float | None:
        """Return the share of the run that is done; None if nobody knows how many schedules it has."""
        if any(each.within is not None for each in self.cells.values()):
            return self._spent
        ran = sum(each.wanted if each.is_done else each.evidence.schedules for each in self.cells.values())
        return max(self._spent or 0.0, ran / max(1, sum(each.wanted for each in self.cells.values())))

    def keep(self, findings: tuple[Finding, ...]) -> None:
        """Number findings as this run's own, for `kvcheck replay RUN#N`. Causes come before their symptoms."""
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
            warnings=(*self.warnings, *([f"{LEFT_OUT}: {self.left_out:,}"] if self.left_out else [])),
            identity=self.identity,
        )

    def save(self, *, complete: bool, exit_code: int | None = None) -> RunRecord:
        record = self.record(complete=complete, exit_code=exit_code)
        try:
            self._store.save(record)
        except UsageError as error:
            self.is_saved = False
            text = f"a save of the record failed: {error}"
            if text not in self.warnings:
                self.warnings.append(text)
                self.teller.warn(text)
            return self.record(complete=complete, exit_code=exit_code)
        self.is_saved = True
        return record

    def progress(self, text: str, share: float | None = None) -> None:
        self._text, self._done = text, share
        self._tell()

    def _tell(self) -> None:
        if self._text:
            self.teller.progress(self._text, self._done)

    @contextmanager
    def ticking(self) -> Iterator[None]:
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
        self.teller.clear()

    def say(self, text: str = "") -> None:
        self.teller.say(text)

    def detail(self, text: str = "") -> None:
        self.teller.detail(text)


def new_run_id() -> str:
    """Date, time and eight random hex digits: ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def tool() -> dict[str, str]:
    return {"name": "kvcheck", "version": __version__}


def environment() -> dict[str, object]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "numpy", "triton", *MOONCAKE_BUILDS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if found := [name for name in MOONCAKE_BUILDS if versions[name] is not None]:  # builds of one library
        versions = {name: version for name, version in versions.items() if name not in MOONCAKE_BUILDS or name in found}
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
    }
