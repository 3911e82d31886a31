"""Selection: picks the comparisons of a case that were asked for, or compares one arm with itself.

Invariants:
- The first arm of a point stays in it: it is the baseline whose second run gives the noise floor.
- An arm that is compared with itself has one maker for both. If a slow-down is planted, both arms have the clock that
  plants it, so the ratio is at most what was planted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench.arms import Arm, Comparison, Maker, Point
from kvcheck.core.bench.memory import FreshMemory

Key = tuple[str, str, str, str, str | None]
AGAIN = "again"
LEAST_WAIT_NS = 5_000


def key(row: BenchRow) -> Key:
    """The key of a row: what it compares."""
    return row.case, row.size, row.arm, row.baseline, row.shape


def only(points: list[Point], wanted: Collection[Key]) -> list[Point]:
    """The wanted comparisons: each point with the arms that they need. Points without any are left out."""
    kept = []
    for point in points:
        rows = tuple(
            row
            for row in point.comparisons
            if (point.case, point.size, row.name or row.arm, row.baseline, point.shape) in wanted
        )
        if rows:
            named = {point.baseline, *(name for row in rows for name in (row.arm, row.baseline, row.limit) if name)}
            makers = {name: make for name, make in point.makers.items() if name in named}
            kept.append(dataclasses.replace(point, makers=makers, comparisons=rows))
    return kept


def beside_itself(points: list[Point], arm: str, percent: float) -> list[Point]:
    """The first point that has this arm, with the arm compared with itself and slowed down by so many percent."""
    for point in points:
        if make := point.makers.get(arm):
            makers = {arm: make, AGAIN: make} if percent == 0 else {arm: slowed(make, 0), AGAIN: slowed(make, percent)}
            return [dataclasses.replace(point, makers=makers, comparisons=(Comparison(arm=AGAIN, baseline=arm),))]
    known = sorted({name for point in points for name in point.makers})
    raise UsageError(f"unknown arm {arm!r}; known: {', '.join(known)}")


def slowed(make: Maker, percent: float) -> Maker:
    """The arm with a wait after its calls of so many percent of their time."""

    def made(memory: FreshMemory) -> Arm:
        arm = make(memory)
        return dataclasses.replace(arm, call=_slowed_call(arm.call, percent / 100))

    return made


def _slowed_call(call: Callable[[], object], share: float) -> Callable[[], None]:
    """Waits shorter than LEAST_WAIT_NS are added up first, because reading the clock would be most of them."""
    clock = time.perf_counter_ns
    owed = 0.0

    def slow() -> None:
        nonlocal owed
        start = clock()
        call()
        end = clock()
        owed += (end - start) * share
        if owed >= LEAST_WAIT_NS:
            until = end + owed
            while end < until:
                end = clock()
            owed = until - end

    return slow
