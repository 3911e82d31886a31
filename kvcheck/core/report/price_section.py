"""The price list on a page: a table by cases with dots, and each case's cost over its sizes.

Invariants:
- A share of a decode step is drawn only if the run measured a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.charts import cost_svg
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.prices import (
    ORDER,
    SERVER,
    added_us,
    curves,
    is_check,
    kind_of,
    largest,
    price_of,
    step_us,
    time_text,
)

HEIGHT, MIDDLE, DOT = 18, 9, 4
"""Height of a row, vertical centre and radius of its dot, in pixels."""
LEAST, MOST = 1e-3, 1e3
"""Smallest and largest ratio on any axis, however far a measurement lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float
    none: float
    is_log: bool
    width: int
    marks: tuple[float, ...]

    def x(self, value: float) -> float:
        if not self.is_log:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return round(DOT + (self.width - 2 * DOT) * min(1.0, max(0.0, share)), 1)


def ratio_axis(ratios: Sequence[Interval]) -> Axis:
    """Span all intervals, and at least 0.8 to 1.25."""
    ends = [end for each in ratios for end in (each.est, each.lo, each.hi) if _is_placed(end)]
    low, high = max(LEAST, min([0.8, *ends])), min(MOST, max([1.25, *ends]))
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = tuple(10.0**power for power in powers) if len(powers) > 1 else (low, 1.0, high)
    return Axis(low=low, high=high, none=1.0, is_log=True, width=150, marks=marks)


SHARES = Axis(low=-10.0, high=10.0, none=0.0, is_log=False, width=110, marks=(-10.0, 0.0, 10.0))
"""Per cent of a decode step. Equal on every page, since this share decides whether a part matters."""


def axis_svg(axis: Axis, unit: str) -> Markup:
    texts = []
    for mark in axis.marks:
        x = axis.x(mark)
        side = "start" if x < 16 else "end" if x > axis.width - 16 else "mid"
        texts.append(Markup('<text class="{}" x="{}" y="12">{}</text>').format(side, x, f"{mark:.3g}{unit}"))
    return _opened("dots", axis.width, HEIGHT, "axis") + Markup("").join(texts) + Markup("</svg>")


def dot_svg(axis: Axis, value: Interval, floor: float, unit: str) -> Markup:
    """Draw one row: the noise floor as a band, the interval as a line, the estimate as a dot."""
    if not math.isfinite(value.est):
        return Markup("")
    low, high = axis.x(axis.none - floor), axis.x(axis.none + floor)
    parts = [
        Markup('<rect class="floor" x="{}" y="1" width="{}" height="{}"/>').format(
            low, round(high - low, 1), HEIGHT - 2
        ),
        Markup('<path class="none" d="M{} 0V{}"/>').format(axis.x(axis.none), HEIGHT),
    ]
    told = f"{value.est:.3g}{unit}"
    if value.lo is not None and value.hi is not None and math.isfinite(value.hi - value.lo):
        told += f" ({value.lo:.3g} to {value.hi:.3g})"
        parts.append(
            Markup('<path class="interval" d="M{} {}H{}"/>').format(axis.x(value.lo), MIDDLE, axis.x(value.hi))
        )
    side = -1 if value.est < axis.low else 1 if value.est > axis.high else 0
    x = axis.x(value.est)
    shape = (
        Markup('<path class="beyond" d="M{} {}l{} -5v10z"/>').format(x + side * DOT, MIDDLE, -side * 9)
        if side
        else Markup('<circle class="dot" cx="{}" cy="{}" r="{}"/>').format(x, MIDDLE, DOT)
    )
    title = f"{told}; noise floor {floor:.2g}{unit}"
    return _opened("dots", axis.width, HEIGHT, title) + Markup("").join([*parts, shape]) + Markup("</svg>")


def _opened(kind: str, width: int, height: int, title: str) -> Markup:
    opened = '<svg class="{k}" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img"><title>{t}</title>'
    return Markup(opened).format(k=kind, w=width, h=height, t=printable(title))


def _is_placed(value: float | None) -> TypeGuard[float]:
    return value is not None and 0 < value < math.inf


def price_section(rows: Sequence[BenchRow]) -> dict[str, object] | None:
    if not rows:
        return None
    priced = [row for row in rows if not is_check(row)]
    steps = {
        f"{row.shape} on {row.device}": time_text(found)
        for row in priced
        if (found := step_us(rows, row.shape, row.device)) is not None and row.shape is not None
    }
    axis = ratio_axis([row.ratio for row in largest(priced)])
    by_case: dict[str, list[BenchRow]] = {}
    for row in priced:
        by_case.setdefault(row.case, []).append(row)
    drawn = [(case, Markup(cost_svg(each))) for case, each in by_case.items()]
    return {
        "steps": [{"where": where, "time": text} for where, text in steps.items()],
        "of_servers": all(kind_of(row.case) == SERVER for row in rows),
        "axis": axis_svg(axis, ""),
        "shares": axis_svg(SHARES, " %") if steps else "",
        "groups": _groups(largest(rows), rows, axis),
        "all": _groups(rows, rows, axis),
        "curves": curves(priced),
        "panels": [{"case": case, "drawing": drawing} for case, drawing in drawn if drawing],
    }


def _groups(chosen: Sequence[BenchRow], rows: Sequence[BenchRow], axis: Axis) -> list[dict[str, object]]:
    groups: dict[str, list[BenchRow]] = {}
    for row in sorted(chosen, key=lambda row: ORDER.index(kind_of(row.case))):
        groups.setdefault(row.case, []).append(row)
    return [
        {
            "case": case,
            "kind": kind_of(case),
            "note": next((row.note for row in each if row.note), ""),
            "rows": [_row(row, step_us(rows, row.shape, row.device), axis) for row in each],
        }
        for case, each in groups.items()
    ]


def _row(row: BenchRow, step: float | None, axis: Axis) -> dict[str, object]:
    return {
        **dataclasses.asdict(price_of(row, step)),
        "arm": row.arm,
        "dot": Markup("") if is_check(row) else dot_svg(axis, row.ratio, row.floor, ""),
        "share_dot": _share_dot(row, step),
    }


def _share_dot(row: BenchRow, step: float | None) -> Markup:
    if not step or is_check(row):
        return Markup("")
    added = added_us(row)
    low, high = (None if each is None else 100 * each / step for each in (added.lo, added.hi))
    share = Interval(100 * added.est / step, low, high)
    return dot_svg(SHARES, share, 100 * row.floor * row.baseline_us.est / step, " %")
