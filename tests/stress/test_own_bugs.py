"""Schedules on which this code once failed stay green, and fail again where the fix is taken away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Backend, Lane, Signal
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.pair import PairEngine
from kvcheck.core.stress.targets.target import FIXED, Engine, Setup, TargetParts
from kvcheck.core.stress.workload.events import Reported

# Each line has a row in WITHOUT_FIX, in the same order, that takes its fix away; it then gives the code it expects.
FOLDER = Path(__file__).parents[1] / "schedules"
LINES = [
    line for path in sorted(FOLDER.glob("*.txt")) for line in path.read_text().splitlines() if line and line[0] != "#"
]


class _Inner:
    """Another backend, but for what a subclass takes away."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _NeverWaits(_Inner):
    """Waits return at once."""

    def wait(self, signal: Signal, *, lane: Lane | None = None) -> None:
        pass


class _NeverDrains(_Inner):
    """What is queued is not waited for."""

    def drain(self) -> None:
        pass


class _NeverIdles(_Inner):
    """No time passes between rounds."""

    def idle(self) -> None:
        pass


class LeasedBeforeClear(MetadataBuffers):
    """The first clear is queued and not waited for."""

    def __init__(self, end: str, *, backend: Backend, **values: Any) -> None:
        super().__init__(end, backend=_NeverWaits(backend), **values)  # type: ignore[arg-type]
        self._backend = backend


class StartsBeforeClear(PairEngine):
    """The first round begins while slots are still being cleared."""

    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        undrained: Any = _NeverDrains(setup.backend)
        super().__init__(replace(parts, metadata=LeasedBeforeClear), replace(setup, backend=undrained))


class PollingPair(PairEngine):
    """With nothing to compute, the next round begins at once."""

    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        super().__init__(parts, setup)
        self._backend: Any = _NeverIdles(setup.backend)


class ForgetsReports(PairEngine):
    """It is idle once no request is under way, whatever has not been reported."""

    @property
    def is_idle(self) -> bool:
        return not any(each.states() for each in (*self.prefill, *self.decode))


class ReportsAttemptsOnce(PairEngine):
    """Failures of a round are reported by request, so two attempts of one request become one."""

    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        def emit(event: object) -> None:
            if isinstance(event, Reported):
                event = replace(event, failed=tuple(dict.fromkeys(event.failed)))
            setup.emit(event)

        super().__init__(parts, replace(setup, emit=emit))


WITHOUT_FIX: tuple[type[PairEngine], ...] = (StartsBeforeClear, PollingPair, ForgetsReports, ReportsAttemptsOnce)


class PairTarget(BuiltinTarget):
    """Builds pairs of one broken class."""

    def __init__(self, pair: type[PairEngine]) -> None:
        super().__init__()
        self._pair = pair

    def build(self, setup: Setup) -> Engine:
        return self._pair(FIXED, setup)


@pytest.mark.schedules
@pytest.mark.parametrize("line", LINES)
def test_a_schedule_that_once_failed_is_green(line: str) -> None:
    outcome = ScheduleRunner(BuiltinTarget()).run(parse_line(line))
    assert [found.message for found in outcome.findings] == []
    assert outcome.verdict is Verdict.PASS


@pytest.mark.schedules
@pytest.mark.parametrize(("line", "broken"), [*zip(LINES, WITHOUT_FIX, strict=True)])
def test_it_fails_again_without_the_fix(line: str, broken: type[PairEngine]) -> None:
    plan = parse_line(line)
    outcome = ScheduleRunner(PairTarget(broken)).run(plan)
    assert plan.expect in {found.code for found in outcome.findings}
