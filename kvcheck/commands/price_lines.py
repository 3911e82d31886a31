"""Prices on a terminal: a heading for each case, a line for each comparison.

Invariants:
- A ratio is never shown without its noise floor.
- A missing measurement is "n/a", never 0. A time of threads is no price and is not shown.
"""

from __future__ import annotations

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow
from kvcheck.core.report.prices import (
    ALIKE,
    SERVER,
    floor_text,
    is_alike,
    is_check,
    kind_of,
    limit_text,
    price_of,
    time_text,
)

HEAD = f"   {'arm':<26} {'size':<14} {'takes':>9}   {'compared with':<22} {'takes':>9}   ratio (95 %)"


def case_heading(row: BenchRow) -> str:
    where = " ".join(part for part in (row.shape, row.device) if part)
    return f" {row.case}  {where}" + (f"  ({row.note})" if row.note else "")


def price_line(row: BenchRow) -> str:
    if is_check(row):
        return f"   {row.arm:<26} {row.size:<14} right, as {row.baseline}, in {counted(len(row.ratios), 'round')}"
    price = price_of(row, None)
    told = price.verdict if kind_of(row.case) == SERVER else ALIKE if is_alike(row) else None
    ends = (f"floor {floor_text(row)}", told, limit_text(row), "noisy" if row.status == "noisy" else None)
    cost, ratio = ("+", "both ") if row.is_added else ("", "")
    return (
        f"   {row.arm:<26} {row.size:<14} {cost + price.cost:>9}   {price.instead:<22} "
        f"{time_text(row.baseline_us.est):>9}   {ratio + price.ratio:<21}  {'  '.join(filter(None, ends))}"
    )
