"""Schedules on which this code once failed stay green, and fail again where the fix is taken away.

Invariants:
- Each line of tests/schedules has a row here that takes its fix away; it then gives the code that the line expects.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Backend, Lane, Signal
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.schedule import parse_line
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.parts import FIXED, TargetParts

FOLDER = Path(__file__).parents[1] / "schedules"
LINES = [
    line for path in sorted(FOLDER.glob("*.txt")) for line in path.read_text().splitlines() if line and line[0] != "#"
]


class _NeverWaits:
    """A backend whose host waits return at once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        """Return at once."""


class LeasedBeforeClear(MetadataBuffers):
    """The first clear is queued and not waited for."""

    def __init__(self, end: str, *, backend: Backend, **values: Any) -> None:
        super().__init__(end, backend=_NeverWaits(backend), **values)  # type: ignore[arg-type]
        self._backend = backend


class PollingScheduler(Scheduler):
    """With nothing to compute, the next round begins at once."""

    def _wait_for_something(self) -> None:
        pass


WITHOUT_FIX: dict[str | None, TargetParts] = {
    "KV102": replace(FIXED, metadata=LeasedBeforeClear),
    "KV901": replace(FIXED, scheduler=PollingScheduler),
}


@pytest.mark.schedules
@pytest.mark.parametrize("line", LINES)
def test_a_schedule_that_once_failed_is_green(line: str) -> None:
    outcome = ScheduleRunner(BuiltinTarget()).run(parse_line(line))
    assert [found.message for found in outcome.findings] == []
    assert outcome.verdict is Verdict.PASS


@pytest.mark.schedules
@pytest.mark.parametrize("line", LINES)
def test_it_fails_again_without_the_fix(line: str) -> None:
    plan = parse_line(line)
    outcome = ScheduleRunner(BuiltinTarget(WITHOUT_FIX[plan.expect])).run(plan)
    assert plan.expect in {found.code for found in outcome.findings}


def test_every_fix_has_its_line() -> None:
    assert sorted(str(parse_line(line).expect) for line in LINES) == sorted(map(str, WITHOUT_FIX))
