"""The smaller schedules of a run's findings, looked for once its stories are told.

Invariants:
- A run without a finding does nothing here and imports nothing for it.
- What was found before an interrupt, or before the time was up, is kept.
"""

from __future__ import annotations

import time

from kvcheck.commands import own_target
from kvcheck.commands.stories import leave_out
from kvcheck.commands.targets import target_of
from kvcheck.core.run.session import Session

SHRINKING_S = 20.0
"""Seconds of wall time that it may take; never more than is left of --max-time."""


def look_for_smaller(session: Session, max_time_s: float | None) -> None:
    """Shrink the first causes, and keep the line and the wait of each."""
    limit_s = SHRINKING_S if max_time_s is None else min(SHRINKING_S, max_time_s - session.elapsed_s)
    if not session.findings or limit_s <= 0:
        return
    from kvcheck.core.run.workers import Unanswered
    from kvcheck.core.stress.smaller import Facts, smaller, with_smaller

    found: dict[str, Facts] = {}
    until = time.monotonic() + limit_s
    try:
        if session.is_of_own_target:
            session.progress("looking for a smaller schedule")
            own_target.smaller(session.findings, found.__setitem__, until=until)
        else:
            for name, facts in smaller(
                session.findings,
                target_of,
                until=until,
                told=lambda done, of: session.progress(f"looking for a smaller schedule: cause {done + 1} of {of}"),
            ):
                found[name] = facts
    except KeyboardInterrupt:
        leave_out(session, "interrupted: not every finding has its smaller schedule")
    except Unanswered as why:
        leave_out(session, f"smaller schedules were not looked for: {why}")
    except Exception as error:  # findings that were made must be printed, whatever is wrong here
        failed = f"{type(error).__name__}: {error}"
        leave_out(session, f"smaller schedules were not looked for: {failed}; please report it with the run.json")
    session.findings = with_smaller(session.findings, found)
