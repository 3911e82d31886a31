"""Every kind of page in headless Chromium, at three widths, in light and dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from report.test_cell_matrix import cell
from report.test_comparison import INDEX, LENGTHS, NEW, OLD, RETRACT, release
from report.test_gate_result import BUDGET, SLOW, gate
from report.test_price_drawing import LARGER, ROW, STEP
from rigs.browser import CHROMIUM, SCHEMES, WIDTHS, Opened, open_pages
from rigs.gate import bench_run
from rigs.literal_record import FAILED, MARKUP, PASSED, UNJUDGED

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.comparison.pages import render as comparison_page
from kvcheck.core.report.gate.pages import render as gate_page
from kvcheck.core.report.to_html import render

SHAPES = ("glm-5.1", "deepseek-v3.2", "deepseek-v3", "llama-3", "llama-3-fp8", "gpt-oss", "qwen3-next")
CELLS = tuple(
    cell(f"{name}/{shape}-tiny") for name in ("retract-resume", "hicache-hybrid", "pd", "aux") for shape in SHAPES
)
OPENED = {
    "pass": "PASS",
    "fail": "FAIL",
    "bench": "PASS",
    "comparison": "FAIL",
    "releases": "FAIL",
    "gate": "FAIL",
    "selftest": "FAIL",
}
VERDICTS = {RETRACT: Verdict.PASS, INDEX: Verdict.PASS, LENGTHS: Verdict.UNKNOWN}
BROKEN = "broken"
WRONG = (
    '<section id="wrong"><img src="http://kvcheck.invalid/x.png"><p style="width:3000px">wide</p>'
    '<div class="wide"><p style="width:2000px">cut off</p></div></section>'
)

pytestmark = [
    pytest.mark.processes(starts=True),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    passed = replace(PASSED, scenarios=CELLS)
    pages = {
        "pass": render(passed),
        "fail": render(FAILED),
        "bench": render(replace(PASSED, scenarios=(), bench=(ROW, LARGER, STEP))),
        "comparison": comparison_page(compare([OLD, replace(NEW, bench=(ROW,))])),
        "releases": comparison_page(
            compare([OLD, NEW, *(release(f"0.5.{n}{'.post1' * (n % 4 == 0)}", VERDICTS) for n in range(20, 28))])
        ),
        "gate": gate_page(gate(FAILED, UNJUDGED, bench_run(SLOW), budgets=(BUDGET,))),
        "selftest": render(replace(FAILED, scenarios=(), findings=(), argv=("kvcheck", "selftest", MARKUP))),
        BROKEN: render(passed).replace("<main>", f"<main>{WRONG}").replace('class="copy"', 'class="copied"'),
    }
    yield open_pages(pages, tmp_path_factory.mktemp("pages"))


def test_every_kind_of_page_was_opened_in_both_schemes(opened: Opened) -> None:
    assert len(opened.seen) == (len(OPENED) + 1) * len(WIDTHS) * len(SCHEMES)
    for (_, width, scheme), seen in opened.seen.items():
        assert seen["width"] == width
        assert seen["is_dark"] == (scheme == "dark")
        assert (seen["background"] == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize(("name", "verdict"), OPENED.items())
def test_a_page_fits_its_window_begins_with_the_verdict_and_asks_no_network(
    opened: Opened, name: str, verdict: str
) -> None:
    for (page, width, _), seen in opened.seen.items():
        if page == name:
            assert seen["errors"] == [] and seen["requests"] == []
            assert seen["wanted"] <= width and seen["wanted_unfolded"] <= width
            assert width != 1280 or seen["cut"] == []
            top, bottom, across = seen["banner"]
            assert 0 <= top < 40 and top < bottom < 700 and across > 0.85 * width and verdict in seen["verdict"]
    assert not [line for line in opened.console if f"/{name}.html" in line]


def test_the_copy_button_copies_the_line_beside_it(opened: Opened) -> None:
    for name in ("pass", "fail", "bench", "selftest"):
        for width in WIDTHS:
            seen = opened.seen[name, width, "light"]
            assert seen["copied"] == seen["line"] and seen["line"].startswith("kvcheck ") and seen["button"] == "copied"


def test_a_page_that_is_wrong_is_found_out(opened: Opened) -> None:
    for (page, width, _), seen in opened.seen.items():
        if page == BROKEN:
            assert seen["wanted"] > width and seen["cut"] and seen["copied"] is None
            assert any("kvcheck.invalid" in error for error in seen["errors"])
    assert [line for line in opened.console if f"/{BROKEN}.html" in line]
