"""Variants: the settings of a scenario as a covering array, and the values for a schedule.

Each row takes the values with the most new pairs. So most pairs of values are tried after a few schedules, and all of
them after one pass.

Invariants:
- The array follows from the table alone, and a row of it from the number of the variant alone.
- Numbers that are STRIDE apart go through all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import gcd

STRIDE = 7
"""The variant of a cell's next schedule is so many numbers further, so that cells share the variants out."""

Kinds = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    number: int
    values: Mapping[str, str]

    def __getitem__(self, kind: str) -> str:
        return self.values[kind]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{kind}:{value}" for kind, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Settings:
    kinds: Kinds

    def variant(self, number: int) -> Variant:
        rows = covering_array(tuple(len(values) for _, values in self.kinds))
        row = rows[number % len(rows)]
        return Variant(number, {kind: values[at] for (kind, values), at in zip(self.kinds, row, strict=True)})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{kind}:{value}" for kind, values in self.kinds for value in values)

    @property
    def variants(self) -> int:
        return len(covering_array(tuple(len(values) for _, values in self.kinds)))


def settings_of(kinds: Mapping[str, Iterable[str]]) -> Settings:
    return Settings(tuple((kind, tuple(values)) for kind, values in kinds.items()))


@cache
def covering_array(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return rows in which each two columns have every pair of values. sizes: number of values of each column. Rows are
    repeated until their number has no factor in common with STRIDE."""
    left = {
        (one, a, other, b)
        for one, other in combinations(range(len(sizes)), 2)
        for a in range(sizes[one])
        for b in range(sizes[other])
    }
    used = [[0] * size for size in sizes]
    rows: list[tuple[int, ...]] = []
    while left or not rows:
        rows.append(_next_row(sizes, left, used))
        for column, value in enumerate(rows[-1]):
            used[column][value] += 1
        left -= {(one, rows[-1][one], other, rows[-1][other]) for one, other in combinations(range(len(sizes)), 2)}
    while gcd(len(rows), STRIDE) > 1:
        rows.append(rows[len(rows) % STRIDE])
    return tuple(rows)


def _next_row(sizes: tuple[int, ...], left: set[tuple[int, int, int, int]], used: list[list[int]]) -> tuple[int, ...]:
    made = [_row_from(start, sizes, left, used) for start in range(len(sizes))]
    return max(made, key=lambda each: each[0])[1] if made else ()


def _row_from(
    start: int, sizes: tuple[int, ...], left: set[tuple[int, int, int, int]], used: list[list[int]]
) -> tuple[int, tuple[int, ...]]:
    """Number of new pairs of a row, and the row: each column has the value with most new pairs, the least used one of
    equals."""
    first = [0] * sizes[start]
    for one, a, other, b in left:
        if start in (one, other):
            first[a if start == one else b] += 1
    row, count = {start: _best(first, used[start])}, 0
    for column in sorted(set(range(len(sizes))) - {start}, key=lambda each: (-sizes[each], each)):
        gains = [
            sum((*min(mine, other), *max(mine, other)) in left for other in row.items())
            for mine in ((column, value) for value in range(sizes[column]))
        ]
        row[column] = _best(gains, used[column])
        count += gains[row[column]]
    return count, tuple(row[column] for column in range(len(sizes)))


def _best(gains: list[int], used: list[int]) -> int:
    return max(range(len(gains)), key=lambda value: (gains[value], -used[value], -value))
