"""Prices on a terminal: one table, printed row by row.

Invariants:
- A ratio is never shown without its noise floor.
- A missing measurement is "n/a", never 0. A time of threads is no price and is not shown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow
from kvcheck.core.report.prices import has_price, is_check, limit_text, price_of
from kvcheck.core.report.wording import fitted, folded

HEADS = ("case, arm", "time", "baseline", "ratio (95 %)", "floor", "verdict")
NATURAL = (23, 9, 23, 23, 8, 38)
"""Columns without a fold."""
NARROWEST = (20, 8, 13, 15, 7, 10)
GAP = 1
LEGEND = (
    "ratio: time of the arm over that of its baseline; below 1 is faster",
    "floor: how far the baseline differs from itself; a smaller difference is noise",
    "plus-...: work added to the baseline; its ratio is of both together",
)


class PriceTable:
    """The lines of a table that grows. A case is named once, and the share of a limit once for each size."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._widths = fitted(NATURAL, NARROWEST, width - 1, GAP)
        self._last: tuple[str, str] | None = None
        self._limit: tuple[str, str, str] | None = None

    def lines(self, row: BenchRow) -> list[str]:
        lines: list[str] = []
        if self._last is None and not is_check(row):
            lines += [*(f" {text}" for text in LEGEND), "", *self._folded(HEADS)]
        if self._last is None or self._last[0] != row.case:
            lines += textwrap.wrap(
                f" {row.case}, {row.size}" + (f": {row.note}" if row.note else ""),
                self._width - 1,
                subsequent_indent=" ",
            )
        elif self._last[1] != row.size:
            lines.append(f" {'':{len(row.case)}}  {row.size}")
        lines += self._folded(price_cells(row))
        if (limit := limit_text(row)) is not None and (row.case, row.size, limit) != self._limit:
            lines.append(f"     reaches {limit}")
            self._limit = row.case, row.size, limit
        self._last = row.case, row.size
        return lines

    def _folded(self, cells: Sequence[str]) -> list[str]:
        return folded(cells, self._widths, margin=1, gap=GAP)


def price_cells(row: BenchRow) -> tuple[str, ...]:
    if is_check(row):
        return f"  {row.arm}", "", row.baseline, "", "", f"right in {counted(len(row.ratios), 'round')}"
    price = price_of(row, None)
    noise = ", noisy" if row.status == "noisy" and has_price(row) else ""
    return (
        f"  {row.arm}",
        f"{'+' if row.is_added else ''}{price.cost}",
        row.baseline,
        price.ratio,
        price.floor,
        price.verdict.removeprefix("n/a: ") + noise,
    )
