"""The story of a finding as text, in the page and as a trace."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rigs.literal_record import FAILED, FOREIGN, HOSTILE, MARKUP, STORY, UNTOLD

from kvcheck.core.base.story import Story
from kvcheck.core.report.charts import MISSING, story_svg
from kvcheck.core.report.screen import cause_lines
from kvcheck.core.report.story_text import lanes_of, story_lines, why_no_story
from kvcheck.core.report.to_html import render
from kvcheck.core.report.to_perfetto import write

TOLD = replace(FOREIGN, story=STORY)
STEP = STORY.steps[0]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("text")]


def test_the_drawing_has_lanes_and_steps_and_names_the_missing_wait() -> None:
    drawn = story_svg(STORY)
    assert sorted(texts(drawn)) == [*"12345", *"ABCD", "no wait"]
    assert "stroke-dasharray" in drawn and MISSING in drawn
    fixed = story_svg(replace(STORY, edges=STORY.edges[1:]))
    assert "no wait" not in texts(fixed) and "stroke-dasharray" not in fixed


def test_the_page_shows_the_story_of_the_cause_and_why_there_is_none() -> None:
    page = render(replace(FAILED, findings=(TOLD, replace(FOREIGN, id="9", code="KV104", story=UNTOLD))))
    assert page.count('<div class="timeline"><svg') == 1 and MARKUP not in page
    assert "no time to run the schedule once more" in page and "DOES NOT WAIT for 3" in page


def test_the_text_has_a_row_for_each_step_and_says_what_does_not_wait() -> None:
    lines = story_lines(TOLD, 200)
    start = next(at for at, line in enumerate(lines) if line.startswith(" lanes"))
    rows = lines[start + 3 : start + 8]
    assert rows == [
        "     1  W . . .   decode.write writes for request 9 #3 to #5",
        "     2  . h . .   frees full page 17   [waits for 1]",
        f"     3 *. . W .   {HOSTILE} writes for request 7 #8",
        "     4  . . | m   prefill-0 sends Status",
        "     5 *R . | .   reads for request 7 #9   [DOES NOT WAIT for 3]",
    ]
    assert "    0  00ff  request 9, position 3  0a0b    request 7, position 0" in lines
    assert "    1  a5a5  never written          -       not known" in lines


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_its_width_and_loses_nothing(width: int) -> None:
    lines = story_lines(TOLD, width)
    assert max(map(len, lines)) <= width
    assert sorted(" ".join(lines).split()) == sorted(" ".join(story_lines(TOLD, 1000)).split())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"story": UNTOLD}, "no time"),
        ({"schedule": "a:known-answers=/m,server=http%3A//x"}, "running server"),
        ({"schedule": ""}, "no one schedule"),
        ({"schedule": "a:shape=b,target=sglang"}, "installed engine"),
        ({"schedule": "a:shape=b,transport=tcp"}, "processes of their own"),
        ({"schedule": "a:shape=b,backend=cuda"}, "device picks its own order"),
        ({"oracle": "audit"}, "audit"),
        ({"page": None, "request": None}, "neither a page nor a request"),
        ({}, "its record has no story"),
    ],
)
def test_a_finding_without_a_story_says_why(change: dict[str, object], why: str) -> None:
    finding = replace(FOREIGN, **{"schedule": "a:shape=b", **change})  # type: ignore[arg-type]
    assert why in str(why_no_story(finding)) and why in story_lines(finding, 200)[-1]


def test_the_terminal_names_the_command_of_a_story_alone() -> None:
    told = replace(TOLD, id=f"{FAILED.run_id}.3")
    record = replace(FAILED, findings=(told,), argv=("stress",))
    elsewhere = replace(record, argv=("stress", "--out", "my runs"))
    untold = replace(record, findings=(replace(told, story=UNTOLD), FOREIGN))
    stored, other, none = (cause_lines(each, 120, {}, is_kept=True) for each in (record, elsewhere, untold))
    assert f"    story     kvcheck show {FAILED.run_id}#3" in stored
    assert f"    story     kvcheck show {FAILED.run_id}#3 --out 'my runs'" in other
    nowhere = cause_lines(record, 120, {}, is_kept=False)
    assert not any("kvcheck show" in line for line in [*none, *nowhere])


# Traces


def trace_of(story: Story, folder: Path) -> list[dict[str, object]]:
    write(replace(FOREIGN, story=story), folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text(encoding="ascii"))
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    rows: list[dict[str, object]] = trace["traceEvents"]
    return rows


def test_a_trace_has_a_thread_for_each_lane_a_slice_for_each_step_and_an_arrow_for_each_wait(tmp_path: Path) -> None:
    events = trace_of(STORY, tmp_path)
    for each in events:
        assert {"ph", "name", "pid", "tid"} <= set(each) and each["ph"] in ("M", "X", "s", "f")
    names = {each["tid"]: each["args"] for each in events if each["name"] == "thread_name"}
    assert [row["name"] for row in names.values()] == lanes_of(STORY)  # type: ignore[index]
    slices = [each for each in events if each["ph"] == "X"]
    assert [each["ts"] for each in slices] == [step.begin for step in STORY.steps]
    assert all(type(each["dur"]) is int and each["dur"] >= 1 for each in slices)
    flows = [(each["id"], each["ph"], each["name"], each["ts"]) for each in events if each["ph"] in ("s", "f")]
    assert flows == [
        (1, "s", "MISSING WAIT", 31),
        (1, "f", "MISSING WAIT", 40),
        (2, "s", "wait", 10),
        (2, "f", "wait", 20),
    ]
    ends = {(each["tid"], each["ts"]) for each in slices}
    assert {(each["tid"], each["ts"]) for each in events if each["ph"] in ("s", "f")} <= ends


def test_slices_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    steps = tuple(replace(STEP, begin=begin, end=end) for begin, end in ((1, 50), (3, 9), (8, None)))
    slices = [each for each in trace_of(replace(STORY, steps=steps, edges=()), tmp_path) if each["ph"] == "X"]
    spans = [(int(str(each["ts"])), int(str(each["dur"]))) for each in slices]
    assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))


# Values
