"""Charts of a page, as SVG elements: the cost of a case over its sizes, the lanes of a story.

Invariants:
- Text stays text: searchable and copyable. A name is never parsed as a formula.
- Equal counts give equal bytes: no date, no random ids, no matplotlibrc.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal, TypeGuard

with contextlib.chdir(Path(__file__).parent):  # matplotlib reads a matplotlibrc of the current folder
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

import numpy as np

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.base.story import HOST, MESSAGE, READ, WRITE, Story
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.prices import is_check, rate_text, size_key, time_text
from kvcheck.core.report.story_text import is_pending, lane_letter, lanes_of

BAR_COLOUR = "#0072b2"
# Mid grey can be read on white and on black; the page gives the text its own colour.
TEXT_COLOUR = "#808080"
NAME_CHARS = 48

SETTINGS = rcParamsDefault | {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcheck",
    "text.parse_math": False,
    "font.size": 9.0,
}
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#8c6d00", "v"), ("#56b4e9", "P"))
"""Colour and marker of a line; the colours of Okabe and Ito are distinct to most colour-blind people."""
STEP, LANE, NARROW, MOST_WIDE = 38, 46, 30, 6
"""Height of a step of a story, width of a lane, its width beyond MOST_WIDE lanes, all in pixels."""
SHAPES = {WRITE: "s", READ: "o", HOST: "D", MESSAGE: ">"}
MISSING = "#d1242f"
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def cost_svg(rows: Sequence[BenchRow]) -> str:
    """Draw the time of each arm and baseline over the sizes; "" for a single size."""
    sizes = [*dict.fromkeys(row.size for row in sorted(rows, key=size_key))]
    lines = _lines(rows, sizes)
    if not lines:
        return ""
    known = {row.size: row.bytes for row in rows if row.bytes}
    is_by_bytes = len({*known.values()}) == len(sizes)
    places = [float(known[size] if is_by_bytes else at + 1) for at, size in enumerate(sizes)]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(5.6, 2.6), facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        for (name, is_baseline), (colour, marker) in zip(lines, cycle(STYLES), strict=False):
            points = sorted(lines[name, is_baseline].items())
            values = [us.est for _, us in points]
            # Distances to the interval's ends; a missing or infinite end is at the estimate.
            ends = [[max(0.0, us.est - (us.lo or us.est)) for _, us in points]]
            ends.append([max(0.0, (us.hi if us.hi and us.hi < math.inf else us.est) - us.est) for _, us in points])
            axes.errorbar(
                [places[at] for at, _ in points],
                values,
                yerr=ends,
                label=_short(name),
                color=colour,
                marker=marker,
                linestyle="--" if is_baseline else "-",
                markersize=4,
                linewidth=1.3,
            )
        axes.set_yscale("log")
        axes.set_xscale("log" if is_by_bytes else "linear")
        axes.set_xticks(places, [_short(size) for size in sizes], rotation=30, ha="right")
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))
        axes.tick_params(colors=TEXT_COLOUR)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(TEXT_COLOUR)
        axes.legend(frameon=False, labelcolor=TEXT_COLOUR, bbox_to_anchor=(1.01, 1.0), loc="upper left")
        return _drawn(figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Cost of an arm over its sizes: a part per call (fixed) and a part per byte (rate)."""

    arm: str
    fixed: str
    rate: str
    sizes: str


def curves(rows: Sequence[BenchRow]) -> list[Curve]:
    """Fit arms that were measured at three sizes or more, small sizes counting as much as large ones."""
    by_arm: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=size_key):
        if row.bytes is not None and not is_check(row):
            by_arm.setdefault(f"{row.case} {row.arm}", []).append(row)
    found = []
    for arm, each in by_arm.items():
        if len(each) < 3:
            continue
        sizes, times = np.array([float(row.bytes or 0) for row in each]), np.array([row.us.est for row in each])
        fixed, rate = "n/a (a time is 0)", "n/a (no slope)"
        if times.min() > 0:
            weights = (times.min() / times) ** 2  # relative to the largest, so none is infinite
            size, time = np.average(sizes, weights=weights), np.average(times, weights=weights)
            spread = np.average((sizes - size) ** 2, weights=weights) or 1.0
            slope = np.average((sizes - size) * (times - time), weights=weights) / spread
            fixed = time_text(max(0.0, float(time - slope * size)))
            rate = rate_text(1, float(slope)) if slope > 0 else rate
        found.append(Curve(arm=arm, fixed=fixed, rate=rate, sizes=", ".join(row.size for row in each)))
    return found


def story_svg(story: Story) -> str:
    lanes, steps = lanes_of(story), story.steps
    wide = LANE if len(lanes) <= MOST_WIDE else NARROW
    with rc_context(SETTINGS):
        figure = Figure(figsize=((wide * (len(lanes) + 1)) / 72, (26 + STEP * len(steps)) / 72), facecolor="none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(-1, len(lanes)), ylim=(len(steps) - 0.5, -0.5 - 26 / STEP))
        for at in range(len(lanes)):
            axes.vlines(at, -0.6, len(steps) - 0.6, color=TEXT_COLOUR, linewidth=0.5)
            axes.text(at, -0.75, lane_letter(at), color=TEXT_COLOUR, ha="center", size=12)
        for at, step in enumerate(steps):
            x = lanes.index(step.lane)
            axes.text(-0.75, at, str(at + 1), color=TEXT_COLOUR, ha="right", va="center", size=12)
            later = [row for row in range(at + 1, len(steps)) if is_pending(step, steps[row].begin)]
            if later:
                axes.vlines(x, at, later[-1] + 0.4, color=TEXT_COLOUR, linewidth=6, alpha=0.4)
            rim, fill = (MISSING if step.is_wrong else BAR_COLOUR), ("none" if step.kind == READ else BAR_COLOUR)
            axes.plot(x, at, SHAPES[step.kind], color=fill, markeredgecolor=rim, markeredgewidth=2.2, markersize=12)
        for edge in sorted(story.edges, key=lambda edge: edge.is_missing):
            ends = [(lanes.index(steps[at].lane), at) for at in (edge.source, edge.target)]
            colour, style = (MISSING, "--") if edge.is_missing else (TEXT_COLOUR, "-")
            arrow = {"arrowstyle": "->", "color": colour, "linestyle": style, "linewidth": 1.6}
            bent = {"shrinkA": 8, "shrinkB": 8, "connectionstyle": "arc3,rad=0.2"}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow | bent)
            if edge.is_missing:
                (x1, y1), (x2, y2) = ends
                axes.text((x1 + x2) / 2, (y1 + y2) / 2, "no wait", color=MISSING, ha="center", weight="bold", size=12)
        return re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', _drawn(figure, bbox=None), count=2)


def _lines(rows: Sequence[BenchRow], sizes: Sequence[str]) -> dict[tuple[str, bool], dict[int, Interval]]:
    """Times by index of the size, for arms and then baselines with two sizes or more."""
    found: dict[tuple[str, bool], dict[int, Interval]] = {}
    for is_baseline in (False, True):
        for row in rows:
            us, name = (row.baseline_us, row.baseline) if is_baseline else (row.us, row.arm)
            if _is_placed(us.est):
                found.setdefault((name, is_baseline), {})[sizes.index(row.size)] = us
    lines: dict[tuple[str, bool], dict[int, Interval]] = {}
    for key, points in found.items():
        is_twin = points in lines.values() or any(name == key[0] for name, _ in lines)
        if len(points) > 1 and not is_twin:
            lines[key] = points
    return lines


def _is_placed(value: float | None) -> TypeGuard[float]:
    """Whether a logarithmic axis can show the time: too small ones underflow."""
    return value is not None and 1e-6 < value < 1e15


def _drawn(figure: Figure, bbox: Literal["tight"] | None = "tight") -> str:
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_figure(stream, format="svg", bbox_inches=bbox, facecolor="none", metadata=NO_METADATA)
    drawn = stream.getvalue()
    # The XML prolog belongs to a file of its own, and ids of groups would occur twice in a page of two charts.
    used = set(re.findall(r"#([\w.-]+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", drawn)
    return drawn[drawn.index("<svg") :].strip()


def _short(name: str) -> str:
    plain = printable(" ".join(name.split()))
    return plain if len(plain) <= NAME_CHARS else plain[: NAME_CHARS - 1] + "…"
