"""BenchPlan: cases, device, precision and limits of a run of benchmarks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench import CASES
from kvcheck.core.bench.arms import Point
from kvcheck.core.stress.workload.shapes import shape as shape_named

Key = tuple[str, str, str, str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """device: cpu, threads, cuda or cuda:N. precision: half width of a ratio's interval at which its rounds may stop.
    max_time_s: also ends a round in progress. rounds_min, rounds_max: for each size; fewer than rounds_min if time runs
    out."""

    cases: tuple[str, ...]
    shape: str
    device: str
    seed: int
    precision: float = 0.03
    max_time_s: float
    rounds_min: int = 15
    rounds_max: int

    def __post_init__(self) -> None:
        if not self.cases:
            raise UsageError(f"bench: expected at least one case, got none; known: {', '.join(CASES.names())}")
        for name in self.cases:
            CASES.require(name)
        shape_named(self.shape)
        kind_of(self.device)
        if not 0 < self.precision < math.inf:
            raise UsageError(f"--precision: expected a number above 0, such as 0.03, got {self.precision}")
        if not 0 < self.max_time_s < math.inf:
            raise UsageError(f"--max-time: expected seconds above 0, got {self.max_time_s}")
        if not 1 <= self.rounds_min <= self.rounds_max:
            raise UsageError(
                f"--rounds: expected at least 1 and no more than the most, got {self.rounds_min} to {self.rounds_max}"
            )
        if self.seed < 0:
            raise UsageError(f"--seed: expected an integer of at least 0, got {self.seed}")


def key(row: BenchRow) -> Key:
    return row.case, row.size, row.arm, row.baseline, row.shape


def only(points: list[Point], wanted: Collection[Key]) -> list[Point]:
    """Return the points with wanted comparisons, each with the arms that they need."""
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
