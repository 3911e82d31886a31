"""Selection: picks requested comparisons of a case.

The first arm of a point stays in it: it is the baseline whose second run gives the noise floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench.arms import Point

Key = tuple[str, str, str, str, str | None]


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
