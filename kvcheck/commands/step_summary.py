"""`-o github=-`: workflow commands on stdout, and the summary of a GitHub Actions step.

Invariants:
- The summary is added to the file that GITHUB_STEP_SUMMARY names, for this format alone; other steps' text stays.
- Nothing is written where the variable is not set, and a warning says so.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvcheck.commands.terminal import say
from kvcheck.core.base.record import RunRecord
from kvcheck.core.report.ci.to_github import outcome_of, summary, workflow_commands
from kvcheck.core.report.gate.result import GateResult

VARIABLE = "GITHUB_STEP_SUMMARY"


def tell_github(subject: RunRecord | GateResult) -> str | None:
    """Print the commands and add the summary. Returns why there is no summary, or None."""
    outcome = outcome_of(subject)
    for line in workflow_commands(outcome):
        say(line)
    path = os.environ.get(VARIABLE)
    if not path:
        return f"{VARIABLE} is not set, so there is no step summary"
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(summary(outcome))
    except OSError as error:
        return f"no step summary at {path}: {error.strerror or error}"
    return None
