"""The damage table as a picture and as rows of markdown: how much of each damage is found, and named.

    PYTHONPATH=.:tests python tests/live/damage_summary.py reports/published/known-answers/damage.csv --picture OUT.svg

OUT ends in svg or png. A field is the share of the trials at that layer, over all heads and each head alone.

Invariants:
- The same table gives the same bytes as svg.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import median

from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

SETTINGS = rcParamsDefault | {"svg.hashsalt": "kvcheck", "svg.fonttype": "none", "font.size": 9.0}
TESTS = {"walk": "walk", "position": "position test"}
DARK = 60  # per cent from which a field's number is white


class Table:
    """Counts of a damage table, added up over heads. Keys: (damage, test, layer)."""

    def __init__(self, path: Path) -> None:
        self.counts: dict[tuple[str, str, int], Counter[str]] = {}
        self.steps: dict[tuple[str, str], list[float]] = {}
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                own = self.counts.setdefault((row["damage"], row["test"], int(row["layer"])), Counter())
                own.update({name: int(row[name]) for name in ("trials", "found", "named")})
                if row["median_step"]:
                    self.steps.setdefault((row["damage"], row["test"]), []).append(float(row["median_step"]))
        self.damage = list(dict.fromkeys(damage for damage, _, _ in self.counts))
        self.layers = sorted({layer for _, _, layer in self.counts})

    def share(self, damage: str, test: str, layer: int, what: str) -> float | None:
        """Per cent of trials that were found, or of found ones that were named; None of nothing."""
        own = self.counts.get((damage, test, layer), Counter())
        whole = own["trials" if what == "found" else "found"]
        return 100 * own[what] / whole if whole else None

    def sums(self, damage: str, test: str) -> Counter[str]:
        """Trials, found and named of a damage over all layers."""
        return sum((self.counts.get((damage, test, layer), Counter()) for layer in self.layers), Counter())


def markdown(table: Table) -> list[str]:
    """A row for each damage: found of tried, named of found, and the median of the rows' median first wrong step."""
    lines = []
    for damage in table.damage:
        cells = [damage.replace("_", " ")]
        for test in TESTS:
            own = table.sums(damage, test)
            step = f"{median(table.steps[damage, test]):.0f}" if own["found"] else "–"
            cells += [f"{own['found']} of {own['trials']}", f"{own['named']} of {own['found']}", step]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def fill(axes: Axes, table: Table, test: str, what: str) -> None:
    """One panel: a row a damage, a column a layer."""
    for y, damage in enumerate(table.damage):
        for x, layer in enumerate(table.layers):
            share = table.share(damage, test, layer, what)
            if share is None:
                axes.text(x, y, "–", ha="center", va="center", color="#808080")
                continue
            axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, color=(0, 0.27, 0.5, share / 100), linewidth=0))
            colour = "white" if share >= DARK else "black"
            axes.text(x, y, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_title(f"{what} by the {TESTS[test]}", fontsize=9)
    axes.set_xticks(range(len(table.layers)), [f"{layer}" for layer in table.layers])
    axes.set_xlabel("damaged layer")
    axes.set_xlim(-0.6, len(table.layers) - 0.4)
    axes.set_ylim(len(table.damage) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw(table: Table, out: Path) -> None:
    """Draw the table into `out`."""
    with rc_context(SETTINGS):
        figure = Figure(figsize=(10.5, 1.3 + 0.3 * len(table.damage)), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 4, sharey=True)
        for axes, (test, what) in zip(panels, product(TESTS, ("found", "named")), strict=True):
            fill(axes, table, test, what)
        panels[0].set_yticks(range(len(table.damage)), [damage.replace("_", " ") for damage in table.damage])
        figure.suptitle(
            "Per cent of damaged runs found, and of these the per cent whose first wrong answer names the place"
        )
        figure.savefig(out, dpi=130, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Print the rows, and draw the picture where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    table = Table(given.table)
    sys.stdout.write("\n".join(markdown(table)) + "\n")
    if given.picture:
        draw(table, given.picture)


if __name__ == "__main__":
    main()
