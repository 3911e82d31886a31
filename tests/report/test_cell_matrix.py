"""Matrices of a report: cells, and situations."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

from rigs.gate import bench_row
from rigs.literal_record import FOREIGN, MARKUP, PASSED, SCENARIOS
from rigs.live_record import LIVE

from kvcheck.commands.terminal import cell_lines
from kvcheck.core.base.record import Coverage, Evidence, Interval, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.situations import situations_of
from kvcheck.core.report.ci.outcome import of_record
from kvcheck.core.report.ci.to_github import summary as github
from kvcheck.core.report.ci.to_gitlab import render as gitlab
from kvcheck.core.report.ci.to_junit import render as junit
from kvcheck.core.report.ci.to_sarif import render as sarif
from kvcheck.core.report.screen import below_lines
from kvcheck.core.report.situation_matrix import matrices, matrix_lines, situation_view
from kvcheck.core.report.to_csv import tables
from kvcheck.core.report.to_html import render
from kvcheck.core.report.view import CellView, cell_matrix, cells_of, judged_text
from kvcheck.core.report.wording import MARKS

FAMILIES = {"glm-5.1-tiny": "nsa", "llama-3-tiny": "mha", "deepseek-v3.2-tiny": "nsa"}
PRICE = replace(bench_row(2.0, case="seal", arm="move-sealed", baseline="move"), ratio=Interval(2.0, 1.9, 2.1))
COUNTS = {"request/running/abort": 12, "request/running/preempt": 1_234, "request/running/retract": 3}


def cell(name: str, verdict: Verdict = Verdict.PASS, schedules: int = 3, reason: str | None = None) -> ScenarioResult:
    _, _, shape = name.partition("/")
    return ScenarioResult(
        id=name,
        shape=shape,
        verdict=verdict,
        reason=reason,
        schedules=schedules,
        duration_s=1.0,
        evidence=Evidence(schedules=schedules, events=70),
        coverage=Coverage(wanted=24, floor=3),
    )


def run(*cells: ScenarioResult) -> RunRecord:
    return replace(PASSED, scenarios=cells, plan={"cells": [], "families": FAMILIES})


def grid(record: RunRecord) -> list[list[str]]:
    """Names of rows and columns, and the texts of the places."""
    columns, rows = cell_matrix(record, cells_of(record))
    return [
        ["", *columns],
        *([name, *(" ".join(map(_text, by.get(column, []))) for column in columns)] for name, by in rows.items()),
    ]


def _text(cell: CellView) -> str:
    return f"{MARKS[cell.row.verdict.value]} {cell.row.schedules}{cell.planned}"


def test_scenarios_by_shapes_with_those_of_a_family_side_by_side() -> None:
    record = run(
        cell("hicache/glm-5.1-tiny"),
        cell("hicache/llama-3-tiny", Verdict.FAIL, 1),
        cell("retract/deepseek-v3.2-tiny", Verdict.UNKNOWN, 0, "no time"),
        cell("retract/llama-3-tiny"),
        cell("retract/llama-3-tiny/tcp"),
    )
    assert grid(record) == [
        ["", "glm-5.1-tiny", "deepseek-v3.2-tiny", "llama-3-tiny"],
        ["hicache", "✔ 3/24", "", "✘ 1/24"],
        ["retract", "", "? 0/24", "✔ 3/24"],
        ["retract over tcp", "", "", "✔ 3/24"],
    ]
    assert "<th>glm-5.1-tiny<br><small>nsa</small></th>" in render(record)


def test_every_cell_leads_to_its_row() -> None:
    text = render(run(*(cell(f"s{row}/t{column}") for row in range(4) for column in range(7))))
    links = re.findall(r'<a class="cell pass" href="#(cell:\d+)"', text)
    rows = re.findall(r'<tr id="(cell:\d+)"', text)
    assert len(links) == len(set(links)) == 28 and set(links) == set(rows)


def test_a_run_that_passes_folds_all_rows_and_one_that_does_not_shows_the_reasons() -> None:
    passing, other = cell("a/x"), cell("b/x", Verdict.UNKNOWN, 0, f"no time {MARKUP}")
    assert "<summary>2 cells: what was tried" in render(run(passing, replace(passing, id="b/x")))
    shown, folded = render(run(passing, other)).split("<summary>1 other cell: what")
    assert "no time &lt;script&gt;" in shown.split('<table class="stack rows">')[1]
    assert '<tr id="cell:1">' in folded and '<tr id="cell:2">' not in folded


def test_a_price_list_has_no_cells_that_pass_and_no_counts_of_nothing() -> None:
    none = Evidence(schedules=8)
    case = ScenarioResult(id="seal", shape="glm-5.1", verdict=Verdict.PASS, schedules=8, evidence=none)
    broken = replace(case, id="tree", verdict=Verdict.UNKNOWN, reason="no room")
    record = replace(run(case), bench=(PRICE,), evidence=none)
    assert cells_of(record) == ()
    text = render(replace(record, scenarios=(case, broken), verdict=Verdict.UNKNOWN))
    assert "<h2>Not measured</h2>" in text and "tree" in text and "no room" in text
    for page in (text, render(record)):
        assert not re.search(r"\b0 (events|requests)|0\.0 s</td>", page)


def test_the_banner_says_how_much_of_the_plan_ran() -> None:
    words = replace(SCENARIOS[0].evidence, schedules=6, orderings_checked=None)
    record = replace(run(cell("a/x"), cell("b/x")), evidence=words)
    assert judged_text(record).startswith("2 cells, of 48 planned schedules: 6 schedules, ")
    unplanned = replace(record, scenarios=tuple(replace(each, coverage=None) for each in record.scenarios))
    assert judged_text(unplanned).startswith("6 schedules, ")


def test_conditional_findings_are_marked_on_their_cells_line_everywhere() -> None:
    cell, other = PASSED.scenarios[0], replace(PASSED.scenarios[0], id="handover/other", shape="other")
    shown = replace(FOREIGN, scenario="handover", shape=cell.shape, condition="the peers differ")
    record = replace(PASSED, scenarios=(cell, other), findings=(shown,))
    outcome, word = of_record(record), "1 conditional finding"
    lines = [cell_lines(row, record.findings)[0] for row in record.scenarios]
    cases = junit(outcome).split("<testcase")[1:]
    table = [line for line in github(outcome).splitlines() if line.startswith("| &#10004; PASS")]
    rows = render(record).partition('<section id="conditional">')[0].split('<tr id="cell:')[1:]
    for marked, plain in (lines, cases, table, rows):
        assert word in marked and word not in plain
    assert render(record).count("&nbsp;37/37 conditional</a>") == 1
    counts = [row["conditional_findings"] for row in csv.DictReader(io.StringIO(tables(record)["scenarios.csv"]))]
    assert counts == ["1", "0"]
    (entry,) = json.loads(gitlab(outcome))
    (result,) = json.loads(sarif(outcome))["runs"][0]["results"]
    assert entry["description"].startswith("conditional KV102") and (result["level"], result["kind"]) == (
        "none",
        "review",
    )


def record_of(scenario: str, counts: dict[str, int]) -> RunRecord:
    evidence = Evidence(schedules=3, situations=counts)
    row = ScenarioResult(id=f"{scenario}/tiny", shape="tiny", verdict=Verdict.PASS, schedules=3, evidence=evidence)
    return replace(PASSED, scenarios=(row,), evidence=evidence)


def test_what_the_scenarios_can_come_into_has_a_count_and_nothing_else_has_one() -> None:
    for matrix in matrices(["retract-resume"], COUNTS):
        for state, _, found in matrix.rows:
            for column, count in zip(matrix.columns, found, strict=True):
                key = f"{matrix.subject}/{state}/{column}"
                is_legal = key in {each.key for each in situations_of("retract-resume")}
                assert count == (COUNTS.get(key, 0) if is_legal else None), key


def test_the_text_has_each_state_once_and_says_what_never_happened() -> None:
    lines = matrix_lines(record_of("retract-resume", COUNTS))
    legal = situations_of("retract-resume")
    assert f"{len(COUNTS)} of {len(legal)} reached" in lines[0]
    (running,) = (line for line in lines if line.split()[:1] == ["running"])
    assert running.split()[1:] == ["12", "1,234", "3"]
    told = " ".join(" ".join(lines[lines.index("", 2) :]).split())
    assert "request retracted (abort)" in told and "request running (" not in told.split("never reached:")[1]
    assert all(len(line) <= 120 for line in lines)


def test_a_run_without_situations_of_its_own_has_no_matrix() -> None:
    ours = record_of("hicache", COUNTS)
    of_engine = replace(ours, environment={**ours.environment, "engine": {"name": "sglang"}})
    for record in (record_of("prefix-cache", COUNTS), record_of("retract-resume", {}), of_engine, LIVE):
        assert matrix_lines(record) == [] and situation_view(record) is None
        assert 'id="situations"' not in render(record)


def test_the_page_shows_counts_and_keys_that_it_does_not_know_as_text() -> None:
    page = render(record_of("retract-resume", COUNTS | {"<script>alert(1)</script>": 3}))
    assert ">1,234</td>" in page and "&lt;script&gt;alert(1)&lt;/script&gt;: 3" in page
    assert "<script>alert(1)" not in page
    assert "Never reached" in page


def test_the_table_has_a_row_a_situation_with_zeros() -> None:
    rows = list(csv.DictReader(io.StringIO(tables(record_of("retract-resume", COUNTS))["situations.csv"])))
    counts = {(row["subject"], row["state"], row["happening"]): int(row["count"]) for row in rows}
    assert len(rows) == len(situations_of("retract-resume"))
    assert counts["request", "running", "preempt"] == 1_234 and counts["request", "retracted", "abort"] == 0


def test_a_green_run_that_was_cut_short_says_how_much_it_left_out() -> None:
    record = record_of("retract-resume", COUNTS)
    (row,) = record.scenarios
    cut = replace(record, scenarios=(replace(row, coverage=Coverage(wanted=24, floor=3)),))
    *_, left, again = below_lines(cut, 120)
    assert left == " not tried    21 of 24 planned schedules" and "go on: kvcheck stress" in again
    whole = replace(row, schedules=24, coverage=Coverage(wanted=24, floor=3))
    failed = replace(row, verdict=Verdict.FAIL, coverage=Coverage(wanted=24, floor=3))
    for each in (replace(cut, complete=False), LIVE, *(replace(record, scenarios=(row,)) for row in (whole, failed))):
        assert not any("not tried" in line for line in below_lines(each, 120))
