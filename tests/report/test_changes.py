"""What kvcheck compare says of two runs: each kind of difference, its exit code, and how it is shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report.test_baseline import run as made
from report.test_gate_result import gate as gate_result
from rigs.gate import bench_row, bench_run, of_this_build
from rigs.literal_record import FOREIGN, MARKUP, PASSED

from kvcheck.commands.gate import result_lines
from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Coverage, Evidence, Interval, RunRecord, Verdict
from kvcheck.core.report.cards import cards_of
from kvcheck.core.report.ci.outcome import of_gate
from kvcheck.core.report.comparison.changes import ChangeState, changes, line_of
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.comparison.pages import markdown
from kvcheck.core.report.comparison.pages import render as page
from kvcheck.core.report.gate.pages import markdown as gate_markdown
from kvcheck.core.report.gate.result import integrity_problems
from kvcheck.core.run.store import RunStore

OTHER = replace(FOREIGN, buffer="latent", message="latent of request 9")
LATENT = replace(FOREIGN, condition="the peers differ")
CELL = "retract-resume/glm-5.1-tiny"


def later(record: RunRecord, **changed: object) -> RunRecord:
    """The record under another id."""
    return replace(record, run_id="20260102-040506-0001", **changed)  # type: ignore[arg-type]


def told(before: RunRecord, after: RunRecord, share: float = 0.5, conditional: bool = False) -> dict[str, int]:
    """How many differences of each kind, with the exit code."""
    found = changes(before, after, share=share, conditional=conditional)
    assert json.loads(found.to_json())["exit_code"] == found.exit_code
    counts = {state.value: len(rows) for state in ChangeState if (rows := found.of(state))}
    return {**counts, "problems": len(found.problems), "exit": found.exit_code}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (made(), made(), {"exit": 0}),
        (made(FOREIGN), made(FOREIGN), {"same": 1, "exit": 0}),
        (made(), made(FOREIGN), {"new": 1, "exit": 1}),
        (made(FOREIGN), made(FOREIGN, OTHER), {"new": 1, "same": 1, "exit": 1}),
        (made(FOREIGN), made(), {"fixed": 1, "exit": 0}),
        (made(FOREIGN), made(OTHER), {"new": 1, "less evidence": 1, "exit": 1}),  # a cell ends when it fails
        (made(FOREIGN), made(schedules=2), {"less evidence": 1, "exit": 4}),  # below its floor
        (made(), made(LATENT), {"conditional": 1, "exit": 0}),
        (made(LATENT), made(), {"fixed": 1, "exit": 0}),
        (made(LATENT), made(FOREIGN), {"new": 1, "less evidence": 1, "exit": 1}),
        (made(), made(schedules=199), {"less evidence": 1, "exit": 4}),
        (made(), made(schedules=200), {"exit": 0}),
        (made(schedules=200), made(), {"exit": 0}),
        (made(unknown=True), made(unknown=True), {"exit": 0}),
        (made(), made(unknown=True), {"exit": 0}),  # a cell that only the later run has
    ],
)
def test_differences_of_two_runs(before: RunRecord, after: RunRecord, expected: dict[str, int]) -> None:
    assert told(before, later(after)) == {"problems": 0, **expected}


def test_conditional_findings_count_where_they_are_asked_to() -> None:
    assert told(made(), later(made(LATENT)), conditional=True) == {"new": 1, "problems": 0, "exit": 1}


def test_another_seed_order_page_and_request_are_no_difference() -> None:
    moved = [replace(each, page=1, row=9, request=40, seen_request=3, message="elsewhere") for each in (OTHER, FOREIGN)]
    assert told(made(FOREIGN, OTHER), later(made(*moved), seed=2)) == {"same": 2, "problems": 0, "exit": 0}


def test_one_cause_in_several_cells_is_one_entry_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """22 findings of one edit were printed one by one, each with its line."""
    cells = [replace(FOREIGN, shape=f"shape-{at}", page=at, replay=f"kvcheck replay {at}") for at in range(4)]
    alike = replace(OTHER, shape="shape-0", replay="kvcheck replay 8")
    other = replace(OTHER, code="KV104", replay="kvcheck replay 9")
    after = later(made(*cells, alike, other))
    found = changes(made(), after, share=0.5)
    groups = found.grouped(ChangeState.NEW)
    assert sorted(map(len, groups)) == [1, 5] and len(found.of(ChangeState.NEW)) == 6
    assert run(["compare", *stored(tmp_path, made(), after)]) == 1
    said = capsys.readouterr().out
    assert " new          6 changes of 2 causes" in said and "4 cells: " in said and "5 changes" in said
    assert said.count("    again     kvcheck replay") == 2 and all(
        f"retract-resume/shape-{at}" in said for at in range(4)
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_entries_fit_the_terminal_and_end_with_a_command(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = [replace(FOREIGN, shape=f"shape-{at}", replay=f"kvcheck replay {at}") for at in range(9)]
    assert run(["compare", *stored(tmp_path, made(), later(made(*cells)))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width or "kvcheck" in line for line in lines)
    assert lines[-2].startswith(" next   kvcheck ") and lines[-1] == " exit 1"


def test_causes_that_one_schedule_shows_are_one_entry_that_counts_them() -> None:
    line = "kvcheck replay hicache:shape=x,seed=1,schedule=0"
    first = replace(FOREIGN, code="KV301", replay=f"{line},expect=KV301")
    others = [
        replace(OTHER, code=code, buffer=buffer, message=f"{buffer} is wrong", replay=f"{line},expect={code}")
        for code, buffer in (("KV304", "k"), ("KV304", "v"), ("KV102", "k"))
    ]
    (group,) = changes(made(), later(made(first, *others)), share=0.5).grouped(ChangeState.NEW)
    assert len(group) == 4 and line_of(group).startswith("KV301 ")
    assert "KV304 x2, KV102 x1" in line_of(group) and "is wrong" not in line_of(group)


def test_gate_and_compare_list_the_cards_of_the_screen() -> None:
    """One bug had 3 entries on a probe's screen, 22 in the gate and 4 with other codes in compare."""
    engine = "schedule=0,target=sglang"
    of_engine = [
        replace(FOREIGN, shape=shape, code=code, oracle=oracle, buffer=buffer, schedule=f"x:shape=a.b,{engine}")
        for shape, code, oracle, buffer in (
            ("a", "KV301", "content", "k"),
            ("a", "KV304", "contract", "k"),
            ("b", "KV102", "content", "v"),
            ("b", "KV304", "contract", "v"),
            ("c", "KV303", "contract", "k"),
        )
    ]
    record = later(made(*of_engine))
    cards = [(card.finding.code, card.finding.cell) for card in cards_of(record.findings)]
    assert len(cards) == 2
    problems = integrity_problems([record])
    heads = [(each.trouble.code, each.trouble.cells[0]) for each in problems if each.trouble and not each.beside]
    *groups, _ = changes(made(), record, share=0.5).grouped(ChangeState.NEW)  # the last: a cell without a finding
    assert heads == [(rows[0].code, rows[0].cell) for rows in groups] == cards
    assert len(problems) == sum(map(len, groups)) == len(of_engine)
    result = gate_result(record, integrity=problems)
    assert [each.code for each in of_gate(result).listed] == [code for code, _ in cards]
    assert len(of_gate(result).troubles) == len(of_engine)
    for text in (gate_markdown(result), "\n".join(result_lines(result))):
        assert "2 problems" in text and text.count("kvcheck replay") == 2


def test_a_cause_that_was_a_symptom_is_not_new() -> None:
    symptom = replace(OTHER, cause=f"{PASSED.run_id}.1")
    assert told(made(FOREIGN, symptom), later(made(OTHER)))["exit"] == 4  # the first cause is neither shown nor fixed


def test_a_cell_that_is_not_run_or_unknown_has_less_evidence() -> None:
    both = made()
    cell = replace(both.scenarios[0], id="handover/x", shape="x")
    both = replace(both, scenarios=(*both.scenarios, cell))
    assert told(both, later(made()))["exit"] == 4
    unknown = replace(cell, verdict=Verdict.UNKNOWN, reason="no such pool", coverage=Coverage(wanted=3, floor=3))
    found = changes(both, later(replace(both, scenarios=(both.scenarios[0], unknown))), share=0.5)
    (less,) = found.of(ChangeState.LESS)
    assert "handover/x" in line_of((less,)) and "no such pool" in line_of((less,))


def test_a_cell_that_the_later_release_has_dropped_is_told_and_counts_for_nothing() -> None:
    dropped = {"environment": {"engine": {"engine": "sglang", "version": "2", "absent": {CELL: "no tree"}}}}
    for before in (made(), made(FOREIGN)):
        after = later(made(), scenarios=(), findings=(), **dropped)
        (note,) = changes(before, after, share=0.5).notes
        assert not changes(before, after, share=0.5).rows and CELL in note and "no tree" in note
        row = replace(made().scenarios[0], verdict=Verdict.UNKNOWN, reason="no tree")
        judged = later(made(), scenarios=(row,), findings=(), **dropped)
        assert told(before, judged)["less evidence"], "what was run and not judged is no dropped cell"


def test_fewer_words_and_situations_are_less_evidence() -> None:
    row = made().scenarios[0]
    rich = replace(row, evidence=replace(row.evidence, situations={"a": 1, "b": 2, "c": 0}))
    poor = replace(row, evidence=Evidence(schedules=400, words_verified={"latent": 5}, situations={"a": 9}))
    found = changes(replace(made(), scenarios=(rich,)), later(replace(made(), scenarios=(poor,))), share=0.6)
    (less,) = found.of(ChangeState.LESS)
    assert "5 words after 1,505,280" in less.text and "1 situations after 2" in less.text


def test_a_cell_that_fails_without_a_finding_is_new() -> None:
    row = replace(made().scenarios[0], verdict=Verdict.FAIL)
    bare = replace(made(), scenarios=(row,), verdict=Verdict.FAIL)
    assert told(made(), later(bare))["exit"] == 1
    assert told(bare, later(bare))["same"] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"complete": False}, "was cut short"),
        ({"warnings": ("3 more findings were made and are not in this record",)}, "make a run of fewer cells"),
        ({"plan": {"cells": ["a:shape=b,target=vllm%3Ax,seed=1,schedule=0"]}}, "judged builtin, and .* judged vllm"),
        ({"scenarios": ()}, "no cell was judged in both runs"),
    ],
)
def test_runs_that_cannot_be_compared(change: dict[str, object], said: str) -> None:
    found = changes(made(), later(made(), **change), share=0.5)
    assert found.exit_code == 4
    assert any(re.search(said, text) for text in found.problems), found.problems


def test_two_checkers_of_an_engine_are_told_and_two_builds_of_kvcheck_are_not() -> None:
    line = "a:shape=b,target=vllm%3Ax,seed=1,schedule=0"
    engine = replace(made(), plan={"cells": [line]})
    assert engine.identity is not None
    other = replace(engine.identity, code="0" * 64)
    found = changes(engine, later(engine, identity=other), share=0.5)
    assert any("two kvchecks judged them" in text for text in found.problems)
    assert told(made(), later(made(), identity=other)) == {"problems": 0, "exit": 0}


def test_prices_are_told_where_they_are_certainly_slower() -> None:
    fast = replace(bench_row(1.0), ratio=Interval(1.0, 0.99, 1.01))
    slow = replace(bench_row(1.3), ratio=Interval(1.3, 1.28, 1.32))
    unsure = replace(bench_row(1.3), ratio=Interval(1.3, 0.9, 1.7))
    before = bench_run(fast)
    assert told(before, later(bench_run(slow))) == {"slower": 1, "problems": 0, "exit": 0}
    assert told(before, later(bench_run(unsure))) == {"problems": 0, "exit": 0}
    assert told(bench_run(slow), later(before)) == {"problems": 0, "exit": 0}
    two = [bench_run(row, replace(row, size="another")) for row in (fast, slow)]
    both = changes(two[0], replace(later(two[1]), seed=99), share=0.5)
    assert list(map(len, both.grouped(ChangeState.SLOWER))) == [1, 1] and not both.notes
    elsewhere = later(bench_run(slow, environment={**before.environment, "hardware": {"cpu": "another"}}))
    found = changes(before, elsewhere, share=0.5)
    assert not found.of(ChangeState.SLOWER) and found.notes == ("prices are not compared: their hardware differs",)


def test_reports_show_the_changes_and_hostile_text_stays_text() -> None:
    hostile = replace(FOREIGN, buffer=f"b {MARKUP}", message=f"{MARKUP} **x**\nmore")
    before, after = made(), later(made(hostile))
    both = replace(compare([before, after]), changes=changes(before, after, share=0.5))
    assert "kvcheck compare: FAIL, exit 1" in markdown(both) and "1 new" in markdown(both)
    for text in (markdown(both), page(both)):
        assert "<script>" not in text and CELL.split("/")[0] in text


def stored(folder: Path, *records: RunRecord) -> list[str]:
    return [str(RunStore(folder / "runs").save(of_this_build(record)).parent) for record in records]


def test_command_says_what_is_new_and_writes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = stored(tmp_path, made(), later(made(FOREIGN)))
    files = {name: tmp_path / f"changes.{name}" for name in ("json", "md", "html")}
    asked = [part for name, path in files.items() for part in ("-o", f"{name}={path}")]
    assert run(["compare", *runs, *asked]) == 1
    said = capsys.readouterr().out
    assert " new          1\n" in said and FOREIGN.replay in said and said.endswith(" exit 1\n")
    assert all(path.is_file() for path in files.values())
    assert json.loads(files["json"].read_text())["rows"][0]["state"] == "new"
    assert run(["compare", *reversed(runs)]) == 0
    assert "FAIL" not in capsys.readouterr().out
    assert run(["compare", *runs, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--least-share", "2"], "expected a share from 0 to 1, got 2"),
        (["-o", "pdf=x.pdf"], "pdf"),
        (["-o", "md"], "expected FORMAT=PATH"),
    ],
)
def test_bad_options_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    assert run(["compare", *stored(tmp_path, made(), later(made())), *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_one_run_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="was given twice"):
        changes(made(), made(), share=0.5)
