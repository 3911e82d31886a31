"""The end of a run: save the record, print findings and verdict, write reports, print the last lines.

Invariants:
- A finding is printed and exits 1, whether or not the record could be saved.
- Without a finding, an unsaved record exits 2.
- A failed report does not change the exit code. A signal does not either: the verdict stands.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.commands.interrupts import verdict_stands
from kvcheck.commands.options import command_line
from kvcheck.commands.probes import reviewed_findings
from kvcheck.commands.report import write_reports
from kvcheck.commands.terminal import columns, warn
from kvcheck.core.base.deadline import Interrupted
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Verdict
from kvcheck.core.report.screen import screen_lines
from kvcheck.core.report.situation_matrix import matrix_lines
from kvcheck.core.run.session import Session


@verdict_stands()
def close(session: Session, outputs: list[tuple[str, Path]], *, reports: bool, interrupted: bool) -> int:
    session.clear_progress()
    code = 130 if interrupted else None
    record = session.save(complete=not interrupted, exit_code=code)
    is_kept = session.is_saved
    if not is_kept:
        code = _code_without_record(record.exit_code)
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


def _code_without_record(exit_code: int) -> int:
    is_no_finding = exit_code in (Verdict.PASS.exit_code, Verdict.UNKNOWN.exit_code)
    return UsageError.exit_code if is_no_finding else exit_code
