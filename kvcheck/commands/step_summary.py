"""`-o github=-`: workflow commands on stdout, and the summary of a GitHub Actions step.

Invariants:
- Only this format appends to the file of GITHUB_STEP_SUMMARY.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvcheck.commands.terminal import say
from kvcheck.core.base.record import RunRecord
from kvcheck.core.report.ci.outcome import outcome_of
from kvcheck.core.report.ci.to_github import summary, workflow_commands
from kvcheck.core.report.gate.result import GateResult

VARIABLE = "GITHUB_STEP_SUMMARY"


def tell_github(subject: RunRecord | GateResult) -> str | None:
    """Print the commands and append the summary. Return why there is none, or None."""
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
