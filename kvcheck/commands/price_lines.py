"""Prices on a terminal: a heading for each case, a line for each comparison.

Invariants:
- A ratio is never shown without the noise floor beside it; a difference below the floor is marked with "~".
- What was not measured is "n/a", never 0. A time of threads is no price and is not shown.
"""

from __future__ import annotations

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.prices import SERVER, is_check, kind_of, verdict


def case_heading(row: BenchRow) -> str:
    """The first line of a case."""
    where = " ".join(part for part in (row.shape, row.device) if part)
    return f" {row.case}  {where}" + (f"  ({row.note})" if row.note else "")


def price_line(row: BenchRow) -> str:
    """Arm, size, cost, baseline, ratio with interval, floor, share of the limit; of running servers what they say; of
    threads how often its output was right."""
    if is_check(row):
        return f"   {row.arm:<26} {row.size:<14} right, as {row.baseline}, in {counted(len(row.ratios), 'round')}"
    limit = ""
    if row.limit is not None and row.limit_ratio is not None:
        limit = f"  {100 * row.limit_ratio.est:.0f} % of {row.limit}"
    within = "~" if is_within_floor(row) else " "
    noisy = "  noisy" if row.status == "noisy" else ""
    told = f"  {verdict(row, None)}" if kind_of(row.case) == SERVER else ""
    return (
        f"   {row.arm:<26} {row.size:<14} {microseconds(row.us.est):>9}   {row.baseline:<20} "
        f"{microseconds(row.baseline_us.est):>9}   {within}{row.ratio.est:.3g} {span(row.ratio):<13} "
        f"floor {100 * row.floor:.1f} %{limit}{noisy}{told}"
    )


def microseconds(value: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} µs"


def span(ratio: Interval) -> str:
    """The interval, or why there is none."""
    return "n/a (rounds<6)" if ratio.lo is None or ratio.hi is None else f"{ratio.lo:.3g}-{ratio.hi:.3g}"


def is_within_floor(row: BenchRow) -> bool:
    """Whether the difference is within the noise floor."""
    return max(row.ratio.est, 1 / row.ratio.est) - 1 <= row.floor
