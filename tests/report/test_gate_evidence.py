"""Evidence and budgets of the gate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.test_gate_result import gate
from rigs.gate import bench_row, bench_run, of_this_build
from rigs.literal_record import CODE, FINDINGS, LINES, MUTANTS, PASSED, UNJUDGED

from kvcheck.commands.gate import result_lines
from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Coverage, Evidence, Identity, RunRecord, Verdict
from kvcheck.core.report.gate.budgets import Budget, read_budgets
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.report.gate.pages import markdown
from kvcheck.core.report.gate.pages import render as page
from kvcheck.core.run.store import RunStore

(CELL,) = PASSED.scenarios
KILLED = replace(
    PASSED, scenarios=(), evidence=Evidence(schedules=0), mutants=MUTANTS[:1], plan={"mutants": [MUTANTS[0].name]}
)
OTHER = "0123456789abcdef" * 4
GOOD = 'case = "read"\narm = "packed"\nbaseline = "views"\n'


def cell(**changed: Any) -> RunRecord:
    """A run whose only cell is changed."""
    return replace(PASSED, scenarios=(replace(CELL, **changed),))


def killed(**changed: Any) -> RunRecord:
    """A selftest whose only mutant is changed."""
    return replace(KILLED, mutants=(replace(MUTANTS[0], **changed),))


def planned(*lines: str) -> RunRecord:
    """A run with another plan."""
    return replace(PASSED, plan={"cells": [*lines]})


def test_the_records_that_are_changed_here_pass() -> None:
    assert gate(PASSED, KILLED, bench_run(bench_row())).exit_code == 0


def test_a_record_whose_cell_was_named_without_its_transport_is_still_evidence() -> None:
    line = f"{CELL.id.replace('/', ':shape=', 1)},transport=tcp"
    assert gate(planned(line)).exit_code == 0
    assert gate(replace(cell(id=f"{CELL.id}/tcp"), plan={"cells": [line]})).exit_code == 0
    assert gate(replace(cell(id=f"{CELL.id}/mooncake"), plan={"cells": [line]})).exit_code == 4


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (UNJUDGED, "no retraction in 200 schedules"),
        (replace(PASSED, complete=False, exit_code=130), "not complete"),
        (replace(PASSED, exit_code=70), "the run is no pass: verdict pass, exit 70"),
        (replace(PASSED, scenarios=()), "judged and measured nothing"),
        (cell(evidence=Evidence(schedules=3)), "without having judged"),
        (
            replace(PASSED, mutants=(replace(MUTANTS[0], verdict=Verdict.UNKNOWN, outcome="not-exercised"),)),
            "not-exerc",
        ),
        (killed(outcome="unknown"), "the outcome 'unknown' is not known"),
        (killed(outcome="not-begun"), "is pass, and its outcome is not-begun"),
        (killed(outcome="survived"), "is pass, and its outcome is survived"),
        (killed(schedules=0), "killed in no schedule"),
        (killed(schedules=-4), "mutants[0].schedules is -4"),
        (killed(killed_by="liveness KV902"), "killed by liveness KV902; expected content"),
        (killed(killed_by=None), "killed by nobody"),
        (replace(KILLED, mutants=()), "index-buffer-not-saved is in the plan, and the record says nothing of it"),
        (replace(KILLED, mutants=KILLED.mutants * 2), "index-buffer-not-saved is there 2 times"),
        (cell(reason="the pool was never full"), "is pass, with the reason why it is none"),
        (cell(code="KV990"), "is pass, with the reason why it is none: KV990"),
        (cell(coverage=None), "does not say how many schedules it planned"),
        (cell(schedules=38), "says 38 schedules, and its evidence 37"),
        (cell(duration_s=-1.0), "scenarios[0].duration_s is -1"),
        (cell(evidence=replace(CELL.evidence, words_verified={"a": -1})), "words_verified.a is -1"),
        (cell(evidence=replace(CELL.evidence, events=912)), "not the sum of its scenarios'"),
        (cell(id="handover/other"), "cell handover/other is not in the plan"),
        (replace(PASSED, scenarios=PASSED.scenarios * 2), "is there 2 times"),
        (planned(LINES[1], LINES[0]), "retract-resume/glm-5.1-tiny is in the plan, and the record says nothing of it"),
        (replace(PASSED, exit_code=4), "verdict pass, exit 4; expected exit 0"),
        (replace(PASSED, verdict=Verdict.UNKNOWN, exit_code=4), "the run is unknown, and the worst of what it judged"),
        (replace(UNJUDGED, verdict=Verdict.PASS, exit_code=0), "the worst of what it judged is unknown"),
        (bench_run(bench_row(), plan={"cases": []}), "the price of read is not in the plan"),
        (planned(f"{LINES[1]},mutant=resume-refeeds-token"), "it judged the mutant resume-refeeds-token"),
        (planned(f"{LINES[1]},trace=a.jsonl"), "does not say what was in the trace"),
        (planned(f"{LINES[1]},target=sglang:/venv"), "does not say which sglang it judged"),
        (replace(PASSED, identity=None), "does not say which build of kvcheck"),
        (replace(PASSED, identity=Identity(trace=OTHER)), "does not say which build of kvcheck"),
        (replace(PASSED, identity=Identity(code=OTHER)), f"its code is {OTHER[:12]}, and {CODE[:12]} here"),
    ],
)
def test_a_record_that_proves_nothing_is_exit_4_with_the_reason(record: RunRecord, said: str) -> None:
    result = gate(record, on_inconclusive="pass")
    assert (result.exit_code, result.verdict, result.integrity) == (4, "UNKNOWN", ())
    assert said in "\n".join(problem.message for problem in result.evidence)


def test_a_pass_beside_its_own_finding_is_red_and_contradicts_itself() -> None:
    finding = replace(FINDINGS[1], scenario="handover", shape=CELL.shape)
    result = gate(replace(PASSED, findings=(finding,)))
    assert result.exit_code == 1
    assert any("is pass, and has findings: KV102" in problem.message for problem in result.evidence)


def engine_run(number: int, target: str, code: str = CODE, trace: str | None = None) -> RunRecord:
    """A run of an installed engine."""
    line = f"{LINES[1]},target=sglang:/venv{number}{',trace=a.jsonl' if trace else ''}"
    return replace(planned(line), run_id=f"run-{number}", identity=Identity(code=code, trace=trace, target=target))


def test_runs_of_one_engine_are_of_one_state_of_it_and_of_one_kvcheck() -> None:
    first, same = engine_run(1, f"sglang 0.5.9, {OTHER}", OTHER), engine_run(2, f"sglang 0.5.9, {OTHER}", OTHER)
    assert gate(PASSED, first, same).exit_code == 0, "which kvcheck judged an engine is not what is gated"
    release = gate(first, engine_run(2, f"sglang 0.5.10, {CODE}", OTHER))
    (problem,) = release.evidence
    assert release.exit_code == 4 and problem.run_id == "run-2"
    assert "is sglang 0.5.10, 3f2c1ab03f2c, and sglang 0.5.9, 0123456789ab in run run-1" in problem.message
    (problem,) = gate(first, engine_run(2, f"sglang 0.5.9, {OTHER}", CODE)).evidence
    assert "the code of kvcheck that judged it" in problem.message


def test_runs_of_one_trace_are_of_one_content_of_it() -> None:
    runs = [engine_run(number, "sglang 1", trace=trace) for number, trace in ((1, CODE), (2, OTHER))]
    (problem,) = gate(*runs).evidence
    assert "the content of a.jsonl is 0123456789ab, and 3f2c1ab03f2c in run run-1" in problem.message


def covered(schedules: int, floor: int = 3) -> RunRecord:
    """A run whose cell ran so many of 24 schedules."""
    evidence = replace(CELL.evidence, schedules=schedules)
    coverage = Coverage(wanted=24, floor=floor, tried=("eager", "lazy"), not_tried=("delay", "random"))
    return replace(cell(schedules=schedules, evidence=evidence, coverage=coverage), evidence=evidence)


@pytest.mark.parametrize(
    ("schedules", "least", "said"),
    [(2, None, "it needs 3, got 2"), (3, None, None), (3, 4, "--min-schedules asks for 4, got 3"), (4, 4, None)],
)
def test_a_cell_that_ran_too_little_is_a_gap(schedules: int, least: int | None, said: str | None) -> None:
    result = gate(covered(schedules), min_schedules=least)
    assert result.exit_code == (4 if said else 0)
    assert [said in problem.message for problem in result.evidence if said] == [True] * bool(said)


def test_every_report_says_how_much_ran_and_of_which_build() -> None:
    result = gate(covered(4), KILLED, bench_run(bench_row()))
    for text in ("\n".join(result_lines(result)), markdown(result), page(result)):
        assert "4 schedules of 24 planned (16 %) in 1 cell" in text and "a pass needs 3 in" in text
        assert "not tried: delay in 1 cell" in text and "3f2c1ab03f2c" in text
    plain = json.loads(result.to_json())["runs"][0]
    assert (plain["schedules"], plain["wanted"], plain["fewest"]) == (4, 24, 4)
    assert plain["not_tried"] == {"delay": 1, "random": 1} and plain["identity"]["code"] == CODE


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits_the_terminal_but_for_commands_and_ends_in_a_decision(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    budget = Budget(case="read", arm="packed", baseline="views", max_ratio=2.0)
    gaps, whole = gate(covered(2), KILLED), gate(covered(4), bench_run(bench_row()), budgets=(budget,))
    for result, decision in ((gaps, "no decision"), (whole, "this change may be merged")):
        lines = result_lines(result)
        assert [line for line in lines if len(line) > width and "next: kvcheck" not in line] == []
        assert decision in lines[-1] + lines[-2]


def test_gate_takes_options_and_refuses_what_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunStore(tmp_path).save(of_this_build(covered(4)))
    command = ["gate", PASSED.run_id, "--out", str(tmp_path)]
    assert run(command) == 0
    assert run([*command, "--min-schedules", "5"]) == 4
    assert "--min-schedules asks for 5, got 4" in capsys.readouterr().out
    assert run([*command, "--min-schedules", "0"]) == 2
    assert run([*command, "--fail-on-conditional"]) == 0


@pytest.mark.schedules
def test_a_run_of_a_mutant_that_shows_nothing_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mutant leaves out a buffer that this shape does not have: the run finds nothing and is UNKNOWN."""
    command = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--mutant", "offload-skips-index-buffer"]
    assert run([*command, "--schedules", "3", "--seed", "1", "--no-reports", "--out", str(tmp_path)]) == 4
    (folder,) = tmp_path.iterdir()
    capsys.readouterr()
    assert run(["gate", str(folder)]) == 4
    assert "it judged the mutant offload-skips-index-buffer" in capsys.readouterr().out


def test_a_symptom_of_a_finding_that_is_no_cause_is_a_contradiction() -> None:
    first, second = (replace(each, condition="a peer of another release") for each in FINDINGS[1:3])
    told = "finding 2 is a symptom of {}, which is no cause in this record"
    good = replace(PASSED, findings=(first, replace(second, cause="1")))
    assert not any("symptom" in line for line in contradictions(good))
    for cause, findings in (
        ("7", (first, replace(second, cause="7"))),
        ("2", (first, replace(second, cause="2"))),
        ("1", (replace(first, cause="2"), replace(second, cause="1"))),
    ):
        assert told.format(cause) in contradictions(replace(PASSED, findings=findings))


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "budgets.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_budget_file_is_read_in_its_order(tmp_path: Path) -> None:
    text = f'[[budget]]\n{GOOD}max_ratio = 2\n[[budget]]\n{GOOD}size = "4 KiB"\nmin_limit_ratio = 0.8\n'
    assert read_budgets(written(tmp_path, text)) == (
        Budget(case="read", arm="packed", baseline="views", max_ratio=2.0),
        Budget(case="read", arm="packed", baseline="views", size="4 KiB", min_limit_ratio=0.8),
    )


@pytest.mark.parametrize(
    ("changed", "is_covered"),
    [
        ({}, True),
        ({"size": "row", "shape": "glm-5.1", "device": "cpu"}, True),
        ({"size": "rows"}, False),
        ({"device": "cuda:0"}, False),
        ({"case": "write"}, False),
        ({"baseline": "clones"}, False),
    ],
)
def test_a_budget_covers_the_rows_it_names(changed: dict[str, str], is_covered: bool) -> None:
    budget = Budget(**({"case": "read", "arm": "packed", "baseline": "views"} | changed), max_ratio=1.0)
    assert budget.covers(bench_row()) is is_covered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected at least one \[\[budget\]\] table"),
        ("budget = 3", r"expected at least one \[\[budget\]\] table"),
        (f"[budget]\n{GOOD}max_ratio = 1", "in double brackets"),
        (f"[[budgets]]\n{GOOD}max_ratio = 1", "unknown key 'budgets'"),
        (f"[[budget]]\n{GOOD}max_ration = 1", "budget 1: .*did you mean 'max_ratio'"),
        (f'[[budget]]\n{GOOD}max_ratio = 1\n[[budget]]\ncase = "x"', "budget 2: the key 'arm' is missing"),
        (f"[[budget]]\n{GOOD}", "expected max_ratio or min_limit_ratio, got none"),
        (f"[[budget]]\n{GOOD}max_ratio = 0", "above 0 and at most 1,000,000, got '0'"),
        (f"[[budget]]\n{GOOD}max_ratio = nan", "expected a number above 0"),
        (f"[[budget]]\n{GOOD}max_ratio = {'9' * 400}", "expected a number above 0"),
        (f"[[budget]]\n{GOOD}max_ratio = true", "expected a number above 0 and at most 1,000,000, got 'True'"),
        (f'[[budget]]\n{GOOD}min_limit_ratio = "0.8"', "min_limit_ratio: expected a number above 0"),
        (f"[[budget]]\n{GOOD}size = 4096\nmax_ratio = 1", "size: expected a name in quotes, got '4096'"),
        (f"[[budget]]\n{GOOD}max_ratio = 1\n" * 2, "budget 2: read: packed over views has a budget already"),
        ("[[budget", "expected a TOML file"),
        (b"\xff\xfe", "expected a TOML file"),
        ("a = " + "[" * 5000, "expected a TOML file"),
    ],
)
def test_a_budget_file_that_is_not_right_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=message) as refused:
        read_budgets(path)
    assert str(path) in str(refused.value)
    with pytest.raises(UsageError, match="expected a TOML file"):
        read_budgets(tmp_path / "missing.toml")
