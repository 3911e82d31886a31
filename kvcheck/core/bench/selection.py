"""Selection: picks the comparisons of a case that were asked for.

Invariants:
- The first arm of a point stays in it: it is the baseline whose second run gives the noise floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kvcheck.core.base.record import BenchRow
from kvcheck.core.bench.arms import Point

Key = tuple[str, str, str, str, str | None]


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
