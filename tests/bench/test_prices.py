"""The price list: what is said of a row follows from its interval, its floor and the decode step."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rigs.literal_record import PASSED

from kvcheck.commands.bench import PriceTable, price_cells
from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report import WRITERS
from kvcheck.core.report.charts import curves
from kvcheck.core.report.prices import ALIKE, Price, added_us, in_short, largest, limit_text, prices_by_case, verdict

ROW = BenchRow(
    case="metadata-read",
    arm="packed-get",
    baseline="ten-views",
    size="row",
    shape="glm-5.1",
    device="cpu",
    bytes=1000,
    us=Interval(5.0, 4.0, 6.0),
    baseline_us=Interval(10.0, 9.0, 11.0),
    ratio=Interval(0.5, 0.4, 0.6),
    floor=0.02,
    ratios=(0.5,) * 15,
    limit="memcpy",
    limit_ratio=Interval(0.8, 0.7, 0.9),
)
STEP = replace(ROW, case="decode-step", arm="protected", baseline="bare", ratio=Interval(1.05, 1.04, 1.06))
STEP = replace(STEP, baseline_us=Interval(1000.0), us=Interval(1050.0), bytes=None)


def price_list(rows: list[BenchRow]) -> list[Price]:
    """The prices of the largest sizes, as the page lists them."""
    return [price for prices in prices_by_case(largest(rows), rows).values() for price in prices]


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Interval(0.5, 0.4, 0.6), "faster"),
        (Interval(0.985, 0.975, 0.99), "free"),  # faster, but by less than the floor
        (Interval(1.005, 1.0, 1.01), "free"),
        (Interval(1.03, 1.01, 1.05), "not told apart"),
        (Interval(1.0201, 1.0, 1.06), "not told apart"),  # the estimate is above the floor, the interval is not
        (Interval(1.04, 1.021, 1.05), "costs"),
        (Interval(1.5, 1.4, 1.6), "costs"),
        (Interval(1.5), "n/a: too few rounds"),
    ],
)
def test_what_is_said_of_a_ratio_beside_its_floor(ratio: Interval, said: str) -> None:
    row = replace(ROW, ratio=ratio)
    assert verdict(row, None) == said and price_cells(row)[-1] == said.removeprefix("n/a: ")


def test_a_ratio_near_one_and_a_small_floor_keep_the_digits_that_differ() -> None:
    row = replace(ROW, arm="plus-guards", ratio=Interval(1.0004, 1.0003, 1.0005), floor=0.00002)
    (price,) = price_list([row])
    assert price_cells(row)[3:5] == (price.ratio, price.floor) == ("1.0004 (1.0003–1.0005)", "±0.002 %")


def test_work_that_is_added_to_its_baseline_is_shown_as_added() -> None:
    """Its ratio is of both together: 3.18 ms beside 3.03 ms and a ratio of 2.05 contradicted each other."""
    row = replace(ROW, case="seal", arm="plus-seal", baseline="move", ratio=Interval(2.05, 2.04, 2.06))
    row = replace(row, us=Interval(3180.0), baseline_us=Interval(3030.0))
    (price,) = price_list([row])
    assert price.instead == "added to move" and price_list([ROW])[0].instead == ROW.baseline
    assert price_cells(row)[1:4] == ("+3.18 ms", "move", "2.05 (2.04–2.06)") and price_cells(ROW)[1] == "5 µs"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_has_heads_and_each_case_once_and_fits_the_terminal(width: int) -> None:
    long = replace(ROW, arm="packed-get-to-mutant", ratio=Interval(1.0004, 1.0003, 1.0005), note="a note " * 30)
    larger = [replace(row, size="larger") for row in (long, ROW)]
    table = PriceTable(width)
    lines = [line for row in (long, ROW, *larger, STEP) for line in table.lines(row)]
    assert max(map(len, lines)) <= width and sum("metadata-read" in line for line in lines) == 1
    (head,) = [line for line in lines if "baseline" in line and "floor" in line and "verdict" in line]
    assert [line.index("ten-views") for line in lines if "ten-views" in line] == [head.index("baseline")] * 4
    assert sum("80 % of memcpy" in line for line in lines) == 3, "once for each size"


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (Interval(0.8, 0.7, 0.9), "80 % of memcpy"),
        (Interval(1.0, 0.9, 1.1), "100 % of memcpy"),
        (Interval(1.03, 0.99, 1.06), f"103 % of memcpy, {ALIKE} from it"),
        (Interval(1.06, 1.01, 1.1), f"106 % of memcpy, {ALIKE} from it"),  # within the floor
        (Interval(1.37, 1.3, 1.4), "137 % of memcpy, beyond this reference"),
        (Interval(1.37), "137 % of memcpy, too few rounds"),
    ],
)
def test_more_than_all_of_a_limit_is_no_share_of_it(share: Interval, told: str) -> None:
    row = replace(ROW, limit_ratio=share)
    assert (
        limit_text(row) == told and told in "\n".join(PriceTable(80).lines(row)) and price_list([row])[0].limit == told
    )


def test_a_thousandth_of_a_step_is_free_however_large_the_ratio() -> None:
    row = replace(ROW, ratio=Interval(3.0, 2.9, 3.1))
    assert added_us(row) == Interval(20.0, pytest.approx(19.0), pytest.approx(21.0))
    assert (verdict(row, 22_000.0), verdict(row, 20_000.0)) == ("free", "costs")


def test_the_list_has_the_largest_size_and_the_share_of_a_step() -> None:
    larger = replace(ROW, size="larger", bytes=2 * (ROW.bytes or 0), ratio=Interval(2.0, 1.9, 2.1))
    first, second = price_list([larger, ROW, STEP])  # a small size may need more rounds, and is told later then
    assert (first.row.case, first.share, first.added) == ("decode-step", "+5.00 %", "+50 µs")
    assert (second.row.size, second.share, second.added) == ("larger", "+1.00 %", "+10 µs")
    assert second.limit == "80 % of memcpy"
    assert price_list([ROW])[0].share == "n/a"
    assert in_short([ROW, STEP]) == (
        "Free or faster than without: metadata-read. Costs something: decode-step (protected +5 %)."
    )
    cheap = replace(ROW, us=Interval(11.0), ratio=Interval(1.02, 1.021, 1.022), baseline_us=Interval(0.1))
    assert in_short([cheap, STEP]).startswith("Less than 0.1 % of a decode step: metadata-read.")
    assert "No price" in in_short([replace(ROW, ratio=Interval(0.5))])
    pages = [replace(ROW, size=size, bytes=None) for size in ("4096 pages", "64 pages", "256 pages")]
    assert [price.row.size for price in price_list(pages)] == ["4096 pages"], "sizes that are not in bytes go by number"


def test_cost_over_size_is_fitted() -> None:
    sizes = [replace(ROW, bytes=size, us=Interval(1.0 + size / 1000)) for size in (1000, 4000, 16000)]
    (curve,) = curves(sizes)
    assert (curve.fixed, curve.rate) == ("1 µs", "1 GB/s")
    assert curves(sizes[:2]) == []


@pytest.mark.parametrize("least", [0.0, 5e-324, 1e-310, 1e-200, 1e-160])
def test_times_that_no_clock_gives_still_make_a_page(least: float, tmp_path: Path) -> None:
    tiny = Interval(least, least, least)
    sizes = [
        replace(ROW, bytes=size, us=us, baseline_us=tiny)
        for size, us in ((1000, tiny), (4000, Interval(2.0)), (16000, Interval(3.0)))
    ]
    step = replace(STEP, baseline_us=tiny)
    for order in (sizes, sizes[::-1], [replace(row, us=tiny) for row in sizes]):
        record = replace(PASSED, bench=(*order, step))
        for name in WRITERS.names():
            WRITERS.load(name)(record, tmp_path / f"run.{name}")
        (curve,) = curves(order)
        assert (curve.fixed == "n/a (a time is 0)") is (least == 0.0)
        shown = [value for row in (*price_list([*order, step]), curve) for value in asdict(row).values()]
        texts = [value for value in shown if isinstance(value, str)]
        assert not any(word in value.split() for value in texts for word in ("inf", "nan", "+inf", "+nan"))
    assert price_list([sizes[1], replace(step, baseline_us=Interval(0.0))])[0].share == "n/a"
