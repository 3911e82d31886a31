"""The stories of a run's findings, made after its cells have ended.

Invariants:
- A missing story is a warning and changes no verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvcheck.commands import own_target
from kvcheck.commands.targets import target_of
from kvcheck.commands.terminal import warn
from kvcheck.core.run.session import Session

STORIES_S = 30.0
"""Seconds of wall time that all stories of a run may take; with --max-time at most a tenth of that."""
LEAST_S = 5.0
SHRINKING_S = 20.0
"""Limit in seconds of wall time; never more than the rest of --max-time."""


def explain_findings(session: Session, max_time_s: float | None) -> None:
    with session.ticking():
        tell_stories(session, max_time_s)
        look_for_smaller(session, max_time_s)


def tell_stories(session: Session, max_time_s: float | None) -> None:
    if not session.findings:
        return
    from kvcheck.core.stress.stories import stories, with_stories

    limit_s = STORIES_S if max_time_s is None else min(STORIES_S, max(LEAST_S, max_time_s / 10))
    until = time.monotonic() + limit_s
    with _spared(session, "how findings came about is not told"):
        if session.is_of_own_target:
            session.progress("telling how it came about")
            told = own_target.stories(session.findings, until=until)
        else:
            told = stories(
                session.findings,
                target_of,
                until=until,
                told=lambda done, of: session.progress(f"telling how it came about: schedule {done + 1} of {of}"),
            )
        session.findings = with_stories(session.findings, told)


def look_for_smaller(session: Session, max_time_s: float | None) -> None:
    limit_s = SHRINKING_S if max_time_s is None else min(SHRINKING_S, max_time_s - session.elapsed_s)
    if not session.findings or limit_s <= 0:
        return
    from kvcheck.core.stress.smaller import Facts, smaller, with_smaller

    found: dict[str, Facts] = {}
    until = time.monotonic() + limit_s
    with _spared(session, "smaller schedules were not looked for"):
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
    session.findings = with_smaller(session.findings, found)


@contextmanager
def _spared(session: Session, lost: str) -> Iterator[None]:
    """Turn an interruption or an error into a warning: findings that were made must be printed."""
    from kvcheck.core.run.workers import Unanswered

    try:
        yield
        return
    except KeyboardInterrupt:
        why = f"interrupted: {lost}"
    except Unanswered as error:
        why = f"{lost}: {error}"
    except Exception as error:
        why = f"{lost}: {type(error).__name__}: {error}; please report it with the run.json"
    session.clear_progress()
    session.warnings.append(why)
    warn(why)
