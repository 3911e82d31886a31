"""The end of a run: its record, its verdict, its reports, the last lines, in this order.

Invariants:
- The record is saved and the findings and verdict are printed before a report is tried.
- The exit code is the record's, whatever becomes of the reports.
"""

from __future__ import annotations

from pathlib import Path

from kvcheck.commands.report import write_reports
from kvcheck.commands.session import Session
from kvcheck.commands.terminal import findings_block, place_lines, verdict_lines, warn


def close(session: Session, targets: list[tuple[str, Path]], *, reports: bool, interrupted: bool) -> int:
    """Save, print and report what a session found; its exit code."""
    session.clear_progress()
    code = 130 if interrupted else None
    record = session.save(complete=not interrupted, exit_code=code)
    session.say()
    for line in [*findings_block(record.findings), *verdict_lines(record)]:
        session.say(line)
    page = None
    if not interrupted:
        page, problems = write_reports(record, session.folder, targets, beside=reports)
        for problem in problems:
            warn(problem)
        if problems:
            session.warnings += problems
            record = session.save(complete=True)
    for line in place_lines(record, page or str(session.folder / "run.json")):
        session.say(line)
    session.print_json(record)
    return record.exit_code
