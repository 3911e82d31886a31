"""Several runs of one kind over time: verdicts by cell, prices with intervals, words judged."""

from __future__ import annotations

from dataclasses import replace

from report.test_cell_matrix import PRICE, cell, run
from rigs.literal_record import MARKUP

from kvcheck.core.base.record import Evidence, Interval, RunRecord, Verdict
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.comparison.to_html import render as page
from kvcheck.core.report.comparison.to_md import render as markdown
from kvcheck.core.report.comparison.trend import trend_of


def night(day: int, verdict: Verdict, ratio: float | None = None, *more: str) -> RunRecord:
    """A run on this day, with a cell a/x and a price."""
    made = run(cell("a/x", verdict), *map(cell, more))
    prices = () if ratio is None else (replace(PRICE, ratio=Interval(ratio, ratio - 0.1, ratio + 0.1)),)
    return replace(
        made,
        run_id=f"run-{day}",
        started_at=f"2026-01-0{day}T00:00:00Z",
        verdict=verdict,
        bench=prices,
        evidence=Evidence(words_verified={"kv": 1000 * day}),
    )


THIRD, FIRST, SECOND = (
    night(3, Verdict.FAIL, 2.5),
    night(1, Verdict.PASS, 2.0),
    night(2, Verdict.PASS, None, f"b/{MARKUP}"),
)


def test_runs_stand_in_the_order_of_their_time_and_gaps_are_no_pass() -> None:
    found = trend_of([THIRD, FIRST, SECOND])
    assert found is not None and found.run_ids == ("run-1", "run-2", "run-3") and found.words == (1000, 2000, 3000)
    assert [each.verdicts for each in found.cells] == [
        (Verdict.PASS, Verdict.PASS, Verdict.FAIL),
        (None, Verdict.PASS, None),
    ]
    (price,) = found.prices
    assert price.ratios == (Interval(2.0, 1.9, 2.1), None, Interval(2.5, 2.4, 2.6))


def test_the_page_and_the_text_have_the_trend() -> None:
    found = compare([THIRD, FIRST, SECOND])
    text = page(found)
    assert "<h2>builtin over time</h2>" in text and text.count('class="dots"') == 2 + 3 and MARKUP not in text
    assert '<span class="cell fail">✘</span>' in text and text.count("<small>not run</small>") == 2
    lines = markdown(found).splitlines()
    assert "| a/x | pass | pass | FAIL |" in lines
    assert "| words judged | 1,000 | 2,000 | 3,000 |" in lines
    assert [line for line in lines if "not measured" in line and "2.5 (2.4–2.6)" in line]
