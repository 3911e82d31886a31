"""The bar chart of words verified per buffer, as SVG to be placed inside a page.

Invariants:
- Text stays text, so that it can be searched, copied and read aloud; a name is never parsed as a formula.
- The same counts give the same bytes: no date, no random ids, no settings of a matplotlibrc.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

with contextlib.chdir(Path(__file__).parent):  # matplotlib reads a matplotlibrc of the current folder
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

from kvcheck.core.report.printable import printable

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
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def words_svg(words: Mapping[str, int]) -> str:
    """An `<svg>` element with one bar per buffer, the most words on top; "" if there is nothing to draw."""
    rows = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_BUFFERS]
    if not rows:
        return ""
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 0.5 + 0.28 * len(rows)), facecolor="none")
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        bars = axes.barh(range(len(rows)), [float(count) for _, count in rows], color=BAR_COLOUR, height=0.62)
        axes.bar_label(bars, labels=[f"{count:,}" for _, count in rows], padding=4, color=TEXT_COLOUR)
        axes.set_yticks(range(len(rows)), [_short(name) for name, _ in rows], color=TEXT_COLOUR)
        axes.set_xticks([])
        axes.set_xlim(0, max(1, rows[0][1]) * 1.18)  # room for the number at the end of the longest bar
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        stream = io.StringIO()
        canvas.print_figure(stream, format="svg", bbox_inches="tight", facecolor="none", metadata=NO_METADATA)
    drawn = stream.getvalue()
    # The XML prolog belongs to a file of its own, not to an element inside a page.
    return drawn[drawn.index("<svg") :].strip()


def _short(name: str) -> str:
    plain = printable(" ".join(name.split()))
    return plain if len(plain) <= NAME_CHARS else plain[: NAME_CHARS - 1] + "…"
