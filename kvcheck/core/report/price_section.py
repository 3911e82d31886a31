"""The price list on a page: a table by cases with dots, and each case's cost over its sizes.

Invariants:
- A share of a decode step is drawn only if the run measured a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from markupsafe import Markup

from kvcheck.core.base.record import BenchRow, Interval
from kvcheck.core.report.charts import cost_svg
from kvcheck.core.report.price_drawing import SHARES, Axis, axis_svg, dot_svg, ratio_axis
from kvcheck.core.report.prices import (
    ORDER,
    SERVER,
    added_us,
    curves,
    is_check,
    kind_of,
    largest,
    price_of,
    step_us,
    time_text,
)


def price_section(rows: Sequence[BenchRow]) -> dict[str, object] | None:
    if not rows:
        return None
    priced = [row for row in rows if not is_check(row)]
    steps = {
        f"{row.shape} on {row.device}": time_text(found)
        for row in priced
        if (found := step_us(rows, row.shape, row.device)) is not None and row.shape is not None
    }
    axis = ratio_axis([row.ratio for row in largest(priced)])
    by_case: dict[str, list[BenchRow]] = {}
    for row in priced:
        by_case.setdefault(row.case, []).append(row)
    drawn = [(case, Markup(cost_svg(each))) for case, each in by_case.items()]
    return {
        "steps": [{"where": where, "time": text} for where, text in steps.items()],
        "of_servers": all(kind_of(row.case) == SERVER for row in rows),
        "axis": axis_svg(axis, ""),
        "shares": axis_svg(SHARES, " %") if steps else "",
        "groups": _groups(largest(rows), rows, axis),
        "all": _groups(rows, rows, axis),
        "curves": curves(priced),
        "panels": [{"case": case, "drawing": drawing} for case, drawing in drawn if drawing],
    }


def _groups(chosen: Sequence[BenchRow], rows: Sequence[BenchRow], axis: Axis) -> list[dict[str, object]]:
    groups: dict[str, list[BenchRow]] = {}
    for row in sorted(chosen, key=lambda row: ORDER.index(kind_of(row.case))):
        groups.setdefault(row.case, []).append(row)
    return [
        {
            "case": case,
            "kind": kind_of(case),
            "note": next((row.note for row in each if row.note), ""),
            "rows": [_row(row, step_us(rows, row.shape, row.device), axis) for row in each],
        }
        for case, each in groups.items()
    ]


def _row(row: BenchRow, step: float | None, axis: Axis) -> dict[str, object]:
    return {
        **dataclasses.asdict(price_of(row, step)),
        "arm": row.arm,
        "dot": Markup("") if is_check(row) else dot_svg(axis, row.ratio, row.floor, ""),
        "share_dot": _share_dot(row, step),
    }


def _share_dot(row: BenchRow, step: float | None) -> Markup:
    if not step or is_check(row):
        return Markup("")
    added = added_us(row)
    low, high = (None if each is None else 100 * each / step for each in (added.lo, added.hi))
    share = Interval(100 * added.est / step, low, high)
    return dot_svg(SHARES, share, 100 * row.floor * row.baseline_us.est / step, " %")
