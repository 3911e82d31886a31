"""Charts of a page, as SVG elements: words verified per buffer, and the cost of a case over its sizes.

Invariants:
- Text stays text: searchable and copyable. A name is never parsed as a formula.
- Equal counts give equal bytes: no date, no random ids, no matplotlibrc.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeGuard

with contextlib.chdir(Path(__file__).parent):  # matplotlib reads a matplotlibrc of the current folder
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.prices import size_key, time_text

BAR_COLOUR = "#0072b2"
# Mid grey can be read on white and on black; the page gives the text its own colour.
TEXT_COLOUR = "#808080"
SHOWN_BUFFERS = 40
NAME_CHARS = 48

SETTINGS = rcParamsDefault | {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcheck",
    "text.parse_math": False,
    "font.size": 9.0,
}
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#8c6d00", "v"), ("#56b4e9", "P"))
"""Colour and marker of a line; the colours of Okabe and Ito are distinct to most colour-blind people."""
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def words_svg(words: Mapping[str, int]) -> str:
    rows = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_BUFFERS]
    if not rows:
        return ""
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 0.5 + 0.28 * len(rows)), facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        bars = axes.barh(range(len(rows)), [float(count) for _, count in rows], color=BAR_COLOUR, height=0.62)
        axes.bar_label(bars, labels=[f"{count:,}" for _, count in rows], padding=4, color=TEXT_COLOUR)
        axes.set_yticks(range(len(rows)), [_short(name) for name, _ in rows], color=TEXT_COLOUR)
        axes.set_xticks([])
        axes.set_xlim(0, max(1, rows[0][1]) * 1.18)  # room for the number at the end of the longest bar
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        return _drawn(figure)


def cost_svg(rows: Sequence[BenchRow]) -> str:
    """Draw the time of each arm and baseline over the sizes; "" for a single size.

    Both axes are logarithmic. Without distinct byte counts, sizes are drawn at equal distances.
    """
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


def _drawn(figure: Figure) -> str:
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_figure(
        stream, format="svg", bbox_inches="tight", facecolor="none", metadata=NO_METADATA
    )
    drawn = stream.getvalue()
    # The XML prolog belongs to a file of its own, and ids of groups would occur twice in a page of two charts.
    used = set(re.findall(r"#([\w.-]+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", drawn)
    return drawn[drawn.index("<svg") :].strip()


def _short(name: str) -> str:
    plain = printable(" ".join(name.split()))
    return plain if len(plain) <= NAME_CHARS else plain[: NAME_CHARS - 1] + "…"
