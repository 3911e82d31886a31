"""Options and steps shared by all commands that make a run, from the options to the exit code.

Invariants:
- A finding is printed and exits 1, whether or not the record could be saved.
- Without a finding, an unsaved record exits 2.
- A failed report does not change the exit code. A signal does not either: the verdict stands.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import typer

from kvcheck.commands.interrupts import verdict_stands
from kvcheck.commands.options import check_positive, command_line
from kvcheck.commands.probes import reviewed_findings
from kvcheck.commands.report import check_outputs, parse_outputs, write_reports
from kvcheck.commands.terminal import Terminal, columns, warn
from kvcheck.core.base.deadline import Interrupted
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Verdict
from kvcheck.core.report.screen import grid_lines, screen_lines
from kvcheck.core.report.situation_matrix import matrix_lines
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of every run. argv: the words of the command."""

    argv: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    seed: int | None
    max_time: float | None
    out: Path
    output: list[str] | None
    format_name: str
    reports: bool
    verbose: bool = False

    def __post_init__(self) -> None:
        check_positive("--max-time", self.max_time)

    @classmethod
    def of(cls, ctx: typer.Context, **more: Any) -> Self:
        """Take each field from the option of its name. more: fields that have no option, or another value."""
        named = {each.name: ctx.params[each.name] for each in fields(cls) if each.name in ctx.params}
        return cls(argv=ctx.obj, **{**named, **more})

    @property
    def until(self) -> float | None:
        return None if self.max_time is None else self.began + self.max_time

    def check_places(self) -> None:
        check_outputs(parse_outputs(self.output, self.format_name))
        make_folder(self.out)

    def session(
        self, *, drawn: int, plan: Mapping[str, object], resumes: bool = False, names_seed: bool = True
    ) -> Session:
        """drawn: the seed. names_seed: whether the command to repeat the run names it."""
        words = ["kvcheck", *(word for word in self.argv if word != "--resume")]
        if names_seed and self.seed is None:
            words += ["--seed", str(drawn)]
        return Session(
            argv=[*self.argv],
            repro=shlex.join(words),
            seed=drawn,
            plan=plan,
            out=self.out,
            teller=Terminal(is_quiet=self.format_name == "json", is_verbose=self.verbose),
            resumes=resumes,
        )

    def draw(self, session: Session) -> None:
        """Show the grid of cells above the progress of a terminal."""
        if isinstance(session.teller, Terminal):
            session.teller.board = lambda width: grid_lines(session.record(complete=False), width)

    def close(self, session: Session, *, interrupted: bool) -> int:
        outputs = parse_outputs(self.output, self.format_name)
        return close(session, outputs, reports=self.reports, interrupted=interrupted)


@verdict_stands()
def close(session: Session, outputs: list[tuple[str, Path]], *, reports: bool, interrupted: bool) -> int:
    session.clear_progress()
    code = 130 if interrupted else None
    record = session.save(complete=not interrupted, exit_code=code)
    is_kept = session.is_saved
    if not is_kept:
        is_no_finding = record.exit_code in (Verdict.PASS.exit_code, Verdict.UNKNOWN.exit_code)
        code = UsageError.exit_code if is_no_finding else record.exit_code
        record = session.record(complete=not interrupted, exit_code=code)
    session.say()
    for line in matrix_lines(record):
        session.detail(line)
    reviewed = reviewed_findings(record, record.findings)
    for line in screen_lines(record, columns(), reviewed, untried=session.untried, is_kept=is_kept):
        session.say(line)
    if interrupted and session.resumes:
        session.say(f" next   {session.repro} --resume")
    try:
        page, problems = write_reports(record, session.folder, outputs, beside=reports)
    except Interrupted:
        again = command_line("report", session.run_id, out=session.folder.parent)
        page, problems = None, (f"interrupted: reports are missing; write them with {again}",)
    for problem in problems:
        warn(problem)
    if problems:
        session.warnings += problems
        record = session.save(complete=not interrupted, exit_code=code)
    kept = str(session.folder / "run.json") if is_kept else "none: run.json could not be saved whole"
    session.say(f" report {page or kept}")
    session.say(f" exit {record.exit_code}")
    session.teller.record(record)
    return record.exit_code
