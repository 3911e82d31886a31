"""Prices as dots, each with its interval and noise floor, on one axis for all rows of a table.

Invariants:
- Each drawing carries its figures as text. A value beyond the axis is an arrow at its edge, never a dot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup

from kvcheck.core.base.record import Interval
from kvcheck.core.report.printable import printable

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
