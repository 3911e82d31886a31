"""Prices as drawings: a dot with its interval and noise floor on one axis for all rows, and lines of cost over size.

Invariants:
- All text of the record is escaped. A drawing needs no script and takes its colours from the page.
- Each drawing has its figures as text too. What lies beyond the axis is an arrow at its edge, never a dot.
- A line goes from the smallest size to the largest, in whatever order they were measured, and has its name beside its
  end, so that colour only repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.prices import size_key, time_text
from kvcheck.core.report.printable import printable

HEIGHT, MIDDLE, DOT = 18, 9, 4
"""Of a row: its height, where the dot is, the dot's radius."""
LEAST, MOST = 1e-3, 1e3
"""Ratios between which an axis ends, however far a measurement lies."""
PANEL_WIDTH, PANEL_HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 62, 245, 12, 160
"""Edges of the plot in a panel; names of lines stand right of it, sizes below."""
LABEL = 14
"""Height of a line's name."""
COLOURS = 6
NAME_CHARS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values from left to right. marks: the values that are written above the rows."""

    low: float
    high: float
    none: float
    is_log: bool
    width: int
    marks: tuple[float, ...]

    def x(self, value: float) -> float:
        """The place of a value, at an edge if it lies beyond."""
        if not self.is_log:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return round(DOT + (self.width - 2 * DOT) * min(1.0, max(0.0, share)), 1)


def ratio_axis(ratios: Sequence[Interval]) -> Axis:
    """From the smallest end of an interval to the largest, and at least from 0.8 to 1.25."""
    ends = [end for each in ratios for end in (each.est, each.lo, each.hi) if _is_placed(end)]
    low, high = max(LEAST, min([0.8, *ends])), min(MOST, max([1.25, *ends]))
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = tuple(10.0**power for power in powers) if len(powers) > 1 else (low, 1.0, high)
    return Axis(low=low, high=high, none=1.0, is_log=True, width=150, marks=marks)


SHARES = Axis(low=-10.0, high=10.0, none=0.0, is_log=False, width=110, marks=(-10.0, 0.0, 10.0))
"""Per cent of a decode step. The same on every page, since that is what decides whether a part matters."""


def axis_svg(axis: Axis, unit: str) -> Markup:
    """The values of the axis, to stand above a column of dots."""
    texts = []
    for mark in axis.marks:
        x = axis.x(mark)
        side = "start" if x < 16 else "end" if x > axis.width - 16 else "mid"
        texts.append(Markup('<text class="{}" x="{}" y="12">{}</text>').format(side, x, f"{mark:.3g}{unit}"))
    return _opened("dots", axis.width, HEIGHT, "axis") + Markup("").join(texts) + Markup("</svg>")


def dot_svg(axis: Axis, value: Interval, floor: float, unit: str) -> Markup:
    """One row: the noise floor as a band, the interval as a line, the estimate as a dot, on the axis."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An arm, or a baseline, over the sizes that it was measured at. points: the place of the size, and the time."""

    name: str
    is_baseline: bool
    points: tuple[tuple[int, Interval], ...]


def cost_svg(case: str, rows: Sequence[BenchRow]) -> Markup | None:
    """The lines of a case; None unless an arm was measured at two sizes. Both axes are logarithms.

    Sizes that are not in bytes, or of as many bytes, stand at equal distances.
    """
    sizes = [*dict.fromkeys(row.size for row in sorted(rows, key=size_key))]
    lines = _lines(rows, sizes)
    if not lines:
        return None
    places = _places(rows, sizes)
    times = [end for line in lines for _, us in line.points for end in (us.est, us.lo, us.hi) if _is_placed(end)]
    low, high = min(times), max(times)
    span = math.log(high) - math.log(low) or 1.0

    def y(us: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (math.log(min(high, max(us, low))) - math.log(low)) / span, 1)

    parts = [*_frame(sizes, places, [(us, y(us)) for us in _marks(low, high)])]
    ends = _spread([y(line.points[-1][1].est) for line in lines])
    for at, (line, label) in enumerate(zip(lines, ends, strict=True)):
        kind = f"line c{at % COLOURS}" + (" baseline" if line.is_baseline else "")
        parts += _drawn(line, kind, [(places[place], y(us.est)) for place, us in line.points], label)
        bars = [
            f"M{places[place]} {y(us.lo)}V{y(us.hi)}"
            for place, us in line.points
            if us.lo is not None and us.hi is not None
        ]
        parts.append(Markup('<path class="{} bars" d="{}"/>').format(kind, "".join(bars)) if bars else Markup(""))
    height = max(PANEL_HEIGHT, int(max(ends)) + LABEL)
    title = f"{case}: time of a call over {len(sizes)} sizes"
    return _opened("panel", PANEL_WIDTH, height, title) + Markup("\n").join(parts) + Markup("</svg>")


def _drawn(line: Line, kind: str, points: Sequence[tuple[float, float]], label: float) -> Iterator[Markup]:
    """The line, and its name beside its end. label: the height of the name."""
    x, y = points[-1]
    path = "L".join(f"{left} {top}" for left, top in points)
    yield Markup('<path class="{}" d="M{}"/>').format(kind, path)
    yield Markup('<path class="{} leader" d="M{} {}L{} {}"/>').format(kind, x + 3, y, RIGHT + 18, label)
    name = line.name if len(line.name) <= NAME_CHARS else line.name[: NAME_CHARS - 1] + "…"
    text = Markup('<text x="{}" y="{}"><title>{}</title>{}</text>')
    yield text.format(RIGHT + 22, label + 4, printable(line.name), printable(name))


def _lines(rows: Sequence[BenchRow], sizes: Sequence[str]) -> list[Line]:
    """Arms and then baselines, each once: an arm that is compared with two baselines has one line."""
    found: dict[tuple[str, bool], dict[int, Interval]] = {}
    for is_baseline in (False, True):
        for row in rows:
            us = row.baseline_us if is_baseline else row.us
            if _is_placed(us.est):
                name = row.baseline if is_baseline else row.arm
                found.setdefault((name, is_baseline), {})[sizes.index(row.size)] = us
    made: list[Line] = []
    for (name, is_baseline), points in found.items():
        ordered = tuple(sorted(points.items()))
        taken = any(each.points == ordered or each.name == name for each in made)
        if len(ordered) > 1 and not taken:
            made.append(Line(name=name, is_baseline=is_baseline, points=ordered))
    return made


def _is_placed(value: float | None) -> TypeGuard[float]:
    """Whether an end of an interval has a place on an axis of logarithms."""
    return value is not None and 0 < value < math.inf


def _places(rows: Sequence[BenchRow], sizes: Sequence[str]) -> list[float]:
    """Where each size stands."""
    known = {row.size: math.log(row.bytes) for row in rows if row.bytes}
    values = [known.get(size, 0.0) for size in sizes]
    if len(known) < len(sizes) or len(set(values)) < len(sizes):
        values = [*map(float, range(len(sizes)))]
    low, high = min(values), max(values)
    return [round(LEFT + 12 + (RIGHT - LEFT - 24) * (value - low) / (high - low), 1) for value in values]


def _marks(low: float, high: float) -> list[float]:
    powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return powers[:: 1 + len(powers) // 6] if len(powers) > 1 else [low, high]


def _frame(sizes: Sequence[str], places: Sequence[float], marks: Sequence[tuple[float, float]]) -> Iterator[Markup]:
    for us, y in marks:
        yield Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, RIGHT)
        yield Markup('<text class="end" x="{}" y="{}">{}</text>').format(LEFT - 5, y + 4, time_text(us))
    taken = -1e9
    for size, x in sorted(zip(sizes, places, strict=True), key=lambda each: each[1]):
        yield Markup('<path class="grid" d="M{} {}v5"/>').format(x, BOTTOM)
        half = 3.2 * len(size)
        if x - half > taken:  # a size whose text would lie on the one before it has its tick alone
            yield Markup('<text class="mid" x="{}" y="{}">{}</text>').format(x, BOTTOM + 18, printable(size))
            taken = x + half


def _spread(places: Sequence[float]) -> list[float]:
    """The same heights, moved down until no name lies on another."""
    moved = [0.0] * len(places)
    below = float(TOP - LABEL)
    for at in sorted(range(len(places)), key=places.__getitem__):
        below = moved[at] = max(places[at], below + LABEL)
    return moved
