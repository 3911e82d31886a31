"""Known findings of a campaign: what a baseline file knows of it, with owner and date.

Invariants:
- The record has every finding. What is known changes what is told and the exit code.
- A row that has expired covers nothing: its finding fails the campaign.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.gate.baseline import Status, judge_rows, known_by
from kvcheck.core.report.gate.baseline_file import read_baseline
from kvcheck.core.report.gate.result import has_enough
from kvcheck.core.run.session import Session

Rows = Callable[[Iterable[Finding]], tuple[ScenarioResult, ...]]

TOLD = (Status.KNOWN.value, Status.EXPIRED.value, Status.GONE.value)


class KnownFindings:
    """The rows of a file; none without one. Raises UsageError for a bad file."""

    def __init__(self, path: Path | None) -> None:
        self._entries = () if path is None else read_baseline(path)
        self._today = datetime.datetime.now(datetime.UTC).date()

    def shown(self, record: RunRecord, rows_of: Rows) -> RunRecord:
        """The record as it is judged: without what is known. rows_of: the rows of cells with these findings."""
        known = known_by(self._entries, [record], self._today)
        if known.is_silent(record):
            return record
        new = known.new(record)
        if len(new) == len(record.findings):
            return record
        rows = rows_of(new)
        verdict = Verdict.worst(row.verdict for row in rows)
        code = (
            verdict.exit_code if record.complete and record.exit_code == record.verdict.exit_code else record.exit_code
        )
        return replace(record, scenarios=rows, findings=new, verdict=verdict, exit_code=code)

    def tell(self, session: Session, record: RunRecord) -> None:
        """The rows that are about something which was found, or is not found any more."""
        for row in judge_rows(self._entries, [record], self._today, has_enough):
            if row.status in TOLD:
                found = f", {counted(row.matches, 'finding')}" if row.matches else ""
                session.say(
                    f" {row.status:<8} row {row.row}: {row.what}{found}; {row.owner}, {row.expires}: {row.reason}"
                )
                if row.text:
                    session.say(f"          {row.text}")
