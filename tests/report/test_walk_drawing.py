"""The drawing of a wrong token: what it shows, that it stays small, and that no record can break it.

Invariants:
- A drawing is parsed as XML, so that what is not escaped fails.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from base.test_record import DAMAGE, changed, places
from rigs.literal_record import MARKUP
from rigs.live_record import LIVE, LIVE_FINDINGS, MARKS, WALK

from kvcheck.core.report.to_html import render
from kvcheck.core.report.walk_drawing import MOST_LAYERS, MOST_SUSPECTS, picture_of, walk_svg

MOST_BYTES = 20_000


def drawn(minimal: dict[str, Any]) -> ElementTree.Element:
    picture = picture_of(minimal)
    assert picture is not None
    return ElementTree.fromstring(walk_svg(picture))


def of_kind(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [each for each in svg if each.get("class") == kind]


def texts(svg: ElementTree.Element, kind: str | None = None) -> list[str]:
    return [each.text or "" for each in svg if each.tag == "text" and kind in (None, each.get("class"))]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = (pair.split() for pair in path.attrib["d"].removeprefix("M").split("L"))
    return [(float(x), float(y)) for x, y in pairs]


def long_walk(layers: int, prompt: int, page: int) -> dict[str, Any]:
    read = [(7919 * (layer + 1)) % prompt for layer in range(layers)]
    rows = [
        {"layer": layer, "page": read[layer] // page, "first": read[layer] // page * page, "why": "why " * 400}
        for layer in range(0, layers, 2)
    ]
    for row in rows:
        row |= {"last": int(str(row["first"])) + page - 1, "head": None, "weight": 1.0}
    return {**WALK, "prompt": prompt, "page": page, "wrong": read, "right": read[::-1], "suspects": rows}


def test_walk_has_both_paths_the_wrong_hop_and_a_letter_for_each_suspect() -> None:
    svg = drawn(WALK)
    (_, right), (_, wrong), (hop,) = of_kind(svg, "right"), of_kind(svg, "wrong"), of_kind(svg, "hop")
    assert len(points(right)) == len(points(wrong)) == 4
    heights = [y for _, y in points(wrong)]
    assert heights == sorted(heights) and len(set(heights)) == 4
    assert points(hop) == points(wrong)[1:3]  # into layer 2, which is suspected first
    assert texts(svg, "letter end") == ["A", "B"]
    assert texts(svg, "mid") == [str(page) for page in range(7)]
    boxes = [(float(each.attrib["x"]), float(each.attrib["width"])) for each in of_kind(svg, "suspect")]
    for (left, width), layer in zip(boxes, (2, 1), strict=True):
        assert left < points(wrong)[layer][0] < left + width


def test_position_test_shows_how_far_back_the_suspected_layer_looks() -> None:
    svg = drawn(MARKS)
    assert texts(svg, "mid")[:2] == ["246", "247"]  # the request is long, and what is read lies at its end
    (hop,) = of_kind(svg, "hop")
    (from_x, from_y), (to_x, to_y) = points(hop)
    assert from_x > to_x and from_y == to_y == points(of_kind(svg, "wrong")[1])[3][1]
    assert "18 back" in texts(svg)


def test_walk_whose_reads_are_close_together_is_drawn_large() -> None:
    near = {**WALK, "prompt": 30_000, "wrong": [2500, 2501, 2502, 2503], "right": [2496, 2497, 2498, 2499]}
    svg = drawn({**near, "suspects": [{"layer": 1, "page": 156, "first": 2496, "last": 2511}]})
    assert texts(svg, "mid") == ["154", "155", "156", "157", "158"]
    assert any("which has pages 0 to 1,875 (16 tokens each)" in text for text in texts(svg))
    left, right = points(of_kind(svg, "wrong")[1])[0][0], points(of_kind(svg, "wrong")[1])[3][0]
    assert right - left > 20 and of_kind(svg, "answer") == []


def test_first_wrong_step_without_a_right_one_before_it_is_drawn() -> None:
    svg = drawn({**WALK, "right": None})
    assert of_kind(svg, "right") == [] and len(of_kind(svg, "wrong")) == 2


def test_hop_is_marked_only_where_the_step_read_a_suspected_page() -> None:
    elsewhere = {**WALK, "suspects": [{**WALK["suspects"][0], "page": 2, "first": 32, "last": 47}]}  # type: ignore[index]
    svg = drawn(elsewhere)
    assert of_kind(svg, "hop") == [] and len(of_kind(svg, "suspect")) == 1


@pytest.mark.parametrize(("layers", "prompt", "page"), [(4, 32, 16), (32, 8_000, 16), (64, 32_000, 64), (192, 1, 1)])
def test_long_drawing_stays_small_and_its_numbers_do_not_overlap(layers: int, prompt: int, page: int) -> None:
    picture = picture_of(long_walk(layers, prompt, page))
    assert picture is not None
    text = walk_svg(picture)
    assert len(text.encode()) <= MOST_BYTES
    svg = ElementTree.fromstring(text)
    numbers = sorted((float(each.attrib["x"]), len(each.text or "")) for each in of_kind(svg, "mid"))
    for (x, chars), (next_x, next_chars) in pairwise(numbers):
        assert x + 4 * chars < next_x - 4 * next_chars
    assert len(of_kind(svg, "suspect")) == min(MOST_SUSPECTS, len(range(0, layers, 2)))
    assert picture.left_out == max(0, len(range(0, layers, 2)) - MOST_SUSPECTS)


def test_text_of_the_record_stays_text() -> None:
    steering = "\x1b[2J\u202e"
    odd = {**WALK, "answered_word": f"{MARKUP}{steering}", "expected_word": "x" * 5000}
    picture = picture_of(odd)
    assert picture is not None
    text = walk_svg(picture)
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text and len(text) < MOST_BYTES
    assert any("alert('x')" in each for each in texts(ElementTree.fromstring(text)))


@pytest.mark.parametrize(
    "odd",
    [
        None,
        {},
        {"requests": 2, "steps": ["write"]},
        {**WALK, "test": "another"},
        {**WALK, "test": ["walk"]},
        {**WALK, "wrong": []},
        {**WALK, "wrong": None},
        {**WALK, "wrong": [1, "2"]},
        {**WALK, "wrong": [True]},
        {**WALK, "wrong": [-1]},
        {**WALK, "wrong": [10**20]},
        {**WALK, "wrong": [0] * (MOST_LAYERS + 1)},
        {**WALK, "page": 0},
        {**WALK, "prompt": "100"},
        {**WALK, "step": None},
    ],
)
def test_what_is_no_wrong_token_is_not_drawn(odd: dict[str, object] | None) -> None:
    assert picture_of(odd) is None
    page = render(replace(LIVE, findings=(replace(LIVE_FINDINGS[0], minimal=odd),)))
    assert "<figure>" not in page and "KV801" in page


def test_odd_suspects_are_left_out_and_the_rest_is_drawn() -> None:
    good = WALK["suspects"][0]  # type: ignore[index]
    odd = [None, 5, {}, {**good, "layer": 10**9}, {**good, "last": 1}, {**good, "page": "4"}, good]
    picture = picture_of({**WALK, "suspects": odd})
    assert picture is not None and [each.page for each in picture.suspects] == [4]
    assert picture_of({**WALK, "suspects": "all"}) == replace(picture, suspects=())


@pytest.mark.parametrize("minimal", [WALK, MARKS], ids=["walk", "position"])
def test_whatever_one_place_holds_the_page_can_be_made(minimal: dict[str, object]) -> None:
    for place in places(minimal):
        for damage in DAMAGE:
            found = picture_of(changed(minimal, place, damage))  # type: ignore[arg-type]
            if found is not None:
                ElementTree.fromstring(walk_svg(found))
