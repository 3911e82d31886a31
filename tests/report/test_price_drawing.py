"""Prices as drawings: dots on one axis, lines over sizes, hostile names, and times that no clock gives."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rigs.gate import bench_row
from rigs.literal_record import MARKUP, PASSED

from kvcheck.core.base.record import Interval
from kvcheck.core.report.charts import cost_svg
from kvcheck.core.report.prices import ratio_axis
from kvcheck.core.report.to_html import render

TIMES = {"us": Interval(20.0, 19.0, 21.0), "baseline_us": Interval(10.0, 9.0, 11.0), "floor": 0.03}
NAMES = {"arm": "sealed", "baseline": "move", "size": "1 KiB", "bytes": 1024}
ROW = replace(
    bench_row(2.0, arm="sealed", baseline="move", size="1 KiB", bytes=1024, **TIMES), ratio=Interval(2.0, 1.9, 2.1)
)
LARGER = replace(ROW, size="1 MiB", bytes=1 << 20, us=Interval(2000.0, 1900.0, 2100.0), baseline_us=Interval(1000.0))
STEP = replace(ROW, case="decode-step", arm="protected", baseline="bare", size="4x64 tokens", bytes=None)


def parsed(drawing: object) -> ET.Element:
    assert not re.search(r"\b(nan|inf)\b", str(drawing))
    return ET.fromstring(str(drawing))


def dots(page: str, kind: str, name: str) -> list[float]:
    """An attribute of the marks of a kind in the first drawing of a row, from left to right."""
    drawing = parsed(
        next(each for each in re.findall(r'<svg class="dots".*?</svg>', page, re.DOTALL) if f'class="{kind}"' in each)
    )
    return [float(str(each.get(name))) for each in drawing.iter() if each.get("class") == kind]


def test_a_dot_stands_between_the_ends_of_its_interval_and_the_floor_round_one() -> None:
    page = render(replace(PASSED, bench=(ROW,)))
    start, end = map(float, re.search(r'class="interval" d="M([\d.]+) 9H([\d.]+)"', page).groups())  # type: ignore[union-attr]
    (dot,), (left,), (width,) = dots(page, "dot", "cx"), dots(page, "floor", "x"), dots(page, "floor", "width")
    axis = ratio_axis([ROW.ratio])
    assert start < dot < end <= axis.width and left < axis.x(1.0) < left + width < dot
    assert "<title>2 (1.9 to 2.1); noise floor 0.03</title>" in page


def test_the_largest_ratios_that_an_axis_holds_are_bounded() -> None:
    axis = ratio_axis([Interval(1e-300, 1e-308, math.inf), Interval(1e300)])
    assert (axis.low, axis.high) == (1e-3, 1e3)
    odd = [replace(ROW, arm=f"a{at}", ratio=ratio) for at, ratio in enumerate([Interval(0.0, 0.0), Interval(1e300)])]
    assert render(replace(PASSED, bench=tuple(odd))).count('class="beyond"') == 4


def names_of(drawing: str) -> list[str]:
    """Texts of a chart."""
    return [each.text or "" for each in parsed(drawing).iter() if each.tag.endswith("text")]


def test_a_line_for_each_arm_and_baseline_over_two_sizes() -> None:
    other = [replace(each, arm="sealed-to-mutant", baseline="mutant") for each in (ROW, LARGER)]
    names = names_of(cost_svg([ROW, LARGER, *other]))
    # An arm that is compared twice is measured once; the second baseline has the times of the first here.
    assert [name for name in names if name in ("sealed", "move", "mutant", "sealed-to-mutant")] == ["sealed", "move"]
    assert {"1 KiB", "1 MiB", "100 µs", "1 ms"} <= set(names)


@pytest.mark.parametrize("least", [0.0, 5e-324, 1e-300])
def test_times_that_no_clock_gives_still_make_a_drawing(least: float) -> None:
    tiny = Interval(least, 0.0, least)
    drawing = cost_svg([replace(ROW, us=tiny), LARGER, replace(LARGER, size="2 MiB", bytes=1 << 21)])
    parsed(drawing)


def test_names_of_the_record_stay_text() -> None:
    rows = [
        replace(each, case=MARKUP, arm=MARKUP, baseline=f"&{MARKUP}\x1b", size=f"{MARKUP}{each.size}")
        for each in (ROW, LARGER)
    ]
    text = render(replace(PASSED, bench=tuple(rows)))
    assert MARKUP not in text and "\x1b" not in text and "&lt;script&gt;" in text
    parsed(cost_svg(rows))
