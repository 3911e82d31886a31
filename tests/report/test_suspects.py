"""Suspects of a wrong token on the page, and records that are damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from base.test_record import DAMAGE, changed, places
from rigs.literal_record import MARKUP
from rigs.live_record import LIVE, LIVE_FINDINGS, MARKS, WALK

from kvcheck.core.report.to_html import render
from kvcheck.core.report.view import MOST_LAYERS, MOST_SUSPECTS, suspects_of


def page_of(minimal: dict[str, object] | None) -> str:
    return render(replace(LIVE, findings=(replace(LIVE_FINDINGS[0], minimal=minimal),)))


def test_a_suspect_is_a_row_with_its_place_what_was_read_and_why() -> None:
    rows, more = suspects_of(WALK)
    given = WALK["suspects"]
    assert isinstance(given, list) and isinstance(wrong := WALK["wrong"], list)
    assert [row.where for row in rows] == [
        "layer 2, page 4 (positions 64 to 79)",
        "layer 1, KV head 3, page 1 (positions 16 to 31)",
    ]
    assert [row.read for row in rows] == [wrong[each["layer"]] for each in given]
    assert [row.why for row in rows] == [each["why"] for each in given] and more == 0
    assert all(row.where in page_of(WALK) for row in rows)


def test_a_long_list_is_cut_and_what_is_left_out_is_counted() -> None:
    one = {"layer": 1, "page": 2, "first": 32, "last": 47, "why": f"{MARKUP}\x1b[2J{'x' * 9000}"}
    long = {**WALK, "suspects": [one] * (MOST_SUSPECTS + 3)}
    rows, more = suspects_of(long)
    assert (len(rows), more) == (MOST_SUSPECTS, 3) and "x" * 3000 not in page_of(long).split("<template")[0]
    assert MARKUP not in page_of(long) and "\x1b" not in page_of(long)


@pytest.mark.parametrize(
    "row",
    [
        5,
        {"layer": MOST_LAYERS, "page": 1, "first": 1, "last": 2},
        {"layer": 1, "page": 1, "first": 2, "last": 1},
        {"layer": True, "page": "1", "first": 1, "last": 2},
        {"layer": 1, "page": 10**20, "first": 1, "last": 2},
    ],
)
def test_a_row_that_names_no_place_is_left_out(row: object) -> None:
    assert suspects_of({**WALK, "suspects": [row]}) == ([], 0)
    assert "suspected place" not in page_of({**WALK, "suspects": [row]})


@pytest.mark.parametrize("minimal", [WALK, MARKS], ids=["walk", "position"])
def test_whatever_one_place_holds_the_page_can_be_made(minimal: dict[str, object]) -> None:
    for place in places(minimal):
        for damage in DAMAGE:
            rows, more = suspects_of(changed(minimal, place, damage))  # type: ignore[arg-type]
            assert len(rows) <= MOST_SUSPECTS and more == 0
