"""The matrix of situations counts what happened, says what never did, and shows hostile keys as text."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from rigs.literal_record import PASSED
from rigs.live_record import LIVE

from kvcheck.core.base.record import Coverage, Evidence, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.situations import situations_of
from kvcheck.core.report.screen import below_lines
from kvcheck.core.report.situation_matrix import matrices, matrix_lines, situation_view
from kvcheck.core.report.to_csv import tables
from kvcheck.core.report.to_html import render

COUNTS = {"request/running/abort": 12, "request/running/preempt": 1_234, "request/running/retract": 3}


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
