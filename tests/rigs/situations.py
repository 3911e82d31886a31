"""An engine that stands still: its subjects are given, and it only notes what is done to them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.cache.scheduler.request import Request, StepReport
from kvcheck.core.stress.targets.target import SpaceCount, Standing


class StillEngine:
    """An Engine. is_able: False: nothing can be made to happen."""

    is_idle = False

    def __init__(self, standing: Sequence[Standing], *, is_able: bool = True) -> None:
        self._standing = tuple(standing)
        self._is_able = is_able
        self.done: list[tuple[str, Standing]] = []

    def submit(self, request: Request) -> None:
        raise AssertionError("nothing is sent to it")

    def abort(self, request_id: int) -> bool:
        raise AssertionError("it is disturbed by make_happen alone")

    def standings(self) -> tuple[Standing, ...]:
        return self._standing

    def make_happen(self, happening: str, standing: Standing) -> bool:
        if self._is_able:
            self.done.append((happening, standing))
        return self._is_able

    def step(self) -> StepReport:
        return StepReport()

    def counts(self) -> tuple[SpaceCount, ...]:
        return ()

    def evictions(self) -> int:
        return 0

    def close(self) -> None:
        """It holds nothing."""
