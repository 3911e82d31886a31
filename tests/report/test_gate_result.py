"""What the gate says of runs as a whole: each kind of failure, its exit code, and how it is shown."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from commands.test_cli_damage import STEERING, steers
from rigs.gate import bench_row, bench_run, gated
from rigs.literal_record import CODE, FAILED, FINDINGS, MUTANTS, PASSED, UNJUDGED
from rigs.schemas import check_fits

from kvcheck.commands.gate import result_lines
from kvcheck.commands.terminal import say
from kvcheck.core.base.record import BenchRow, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.gate.budgets import Budget
from kvcheck.core.report.gate.judge import Rules, decide
from kvcheck.core.report.gate.pages import markdown
from kvcheck.core.report.gate.pages import render as page
from kvcheck.core.report.gate.result import (
    GateResult,
    Problem,
    conditional_findings,
    evidence_problems,
    gated_rows,
    integrity_problems,
    summaries,
    tally,
)
from kvcheck.core.report.markdown import escaped

BUDGET = Budget(case="read", arm="packed", baseline="views", max_ratio=1.0)
SLOW, FAST, UNSURE = bench_row(1.2), bench_row(0.9), bench_row(1.0, rounds=(0.0, 0.1))
(CELL,) = PASSED.scenarios
UNTRIED = replace(MUTANTS[0], verdict=Verdict.UNKNOWN, outcome="not-exercised")
HOSTILE = f"<img src=x onerror=alert(1)> | [a](http://x.invalid) **b** `c` @d\n# e {STEERING}"


def gate(
    *records: RunRecord,
    budgets: tuple[Budget, ...] = (),
    again: BenchRow | str = "gone",
    min_schedules: int | None = None,
    fail_on_conditional: bool = False,
    **changed: Any,
) -> GateResult:
    """What the gate says of these runs, when measuring a row again finds `again`."""
    found, missing, warnings = gated_rows(records, budgets)
    rows, is_complete = decide(found, Rules(), lambda rows: [again for _ in rows])
    result = GateResult(
        tool={"name": "kvcheck", "version": "0"},
        code=CODE,
        argv=("gate", "x"),
        runs=summaries(records),
        min_schedules=min_schedules,
        fail_on_conditional=fail_on_conditional,
        budget_file="budgets.toml" if budgets else None,
        tol=0.03,
        fail_over=0.1,
        on_inconclusive="fail",
        tally=tally(records),
        integrity=integrity_problems(records, fail_on_conditional=fail_on_conditional),
        conditional=conditional_findings(records),
        evidence=(*evidence_problems(records, code=CODE, min_schedules=min_schedules), *missing),
        baseline=None,
        rows=rows,
        warnings=warnings,
        complete=is_complete,
        duration_s=1.5,
    )
    result = replace(result, **changed)
    check_fits(json.loads(result.to_json()), "gate")
    return result


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (FAILED, "KV102 retract-resume/glm-5.1-tiny"),
        (replace(PASSED, findings=FINDINGS[1:2]), "KV102"),  # a verdict that says pass beside a finding
        (replace(PASSED, verdict=Verdict.FAIL), "the run failed"),
        (replace(PASSED, exit_code=1), "the run failed"),
        (replace(PASSED, mutants=MUTANTS), "metadata-read-returns-view: survived"),
        (replace(FAILED, findings=(), mutants=()), "retract-resume/glm-5.1-tiny failed: KV102"),
    ],
)
def test_a_finding_or_failure_is_exit_1_and_stays_red(record: RunRecord, said: str) -> None:
    slow_too = gate(record, bench_run(SLOW), budgets=(BUDGET,), again=SLOW, on_inconclusive="pass")
    for result in (gate(record), gate(PASSED, record), slow_too):
        assert (result.exit_code, result.verdict) == (1, "FAIL")
        assert any(said in problem.message for problem in result.integrity)


def test_a_benchmark_is_the_evidence_of_its_own_verdict() -> None:
    verdict = ScenarioResult(id="read", shape="glm-5.1", verdict=Verdict.PASS, schedules=15)
    assert gate(bench_run(FAST, scenarios=(verdict,)), budgets=(BUDGET,)).exit_code == 0
    assert gate(bench_run(scenarios=(verdict,))).exit_code == 4
    unknown = replace(verdict, verdict=Verdict.UNKNOWN, reason="no device")
    assert gate(bench_run(FAST, scenarios=(unknown,))).exit_code == 4


@pytest.mark.parametrize(
    ("rows", "budget", "said"),
    [
        ((), BUDGET, "next: kvcheck bench read"),
        ((FAST,), replace(BUDGET, size="page"), "not measured in these runs"),
        ((FAST,), replace(BUDGET, min_limit_ratio=0.8), "no physical limit"),
        ((replace(FAST, status="unknown", note="busy"),), BUDGET, "busy"),
        ((replace(FAST, ratios=()),), BUDGET, "it has no rounds"),
    ],
)
def test_a_budget_whose_row_is_not_there_is_exit_4(rows: tuple[BenchRow, ...], budget: Budget, said: str) -> None:
    result = gate(PASSED, bench_run(*rows), budgets=(budget,), on_inconclusive="pass")
    assert result.exit_code == 4
    assert any(said in problem.message for problem in result.evidence)


def test_worst_wins() -> None:
    slow, missing = bench_run(SLOW), replace(BUDGET, case="write")
    assert gate(slow, UNJUDGED, budgets=(BUDGET, missing), again=SLOW).exit_code == 3
    assert gate(slow, FAILED, UNJUDGED, budgets=(BUDGET, missing), again=SLOW).exit_code == 1
    assert gate(FAILED, complete=False).exit_code == 130
    let_pass = gate(PASSED, bench_run(UNSURE), budgets=(BUDGET,), again=UNSURE, on_inconclusive="warn")
    assert let_pass.exit_code == 0 and any("INCONCLUSIVE let pass" in line for line in result_lines(let_pass))


def hostile() -> GateResult:
    """Every text that can come from a record, hostile."""
    finding = replace(FINDINGS[1], scenario=HOSTILE, shape=HOSTILE, message=HOSTILE, code="KV102")
    row = bench_row(1.2, case=HOSTILE, arm=HOSTILE, baseline=HOSTILE, size=HOSTILE, shape=HOSTILE, device=HOSTILE)
    budget = replace(BUDGET, case=HOSTILE, arm=HOSTILE, baseline=HOSTILE)
    failed = replace(FAILED, findings=(finding,))
    unknown = replace(UNJUDGED, scenarios=(replace(UNJUDGED.scenarios[0], id=HOSTILE, reason=HOSTILE),))
    return gate(failed, unknown, bench_run(row), budgets=(budget, replace(budget, size="none")), again=HOSTILE)


def test_hostile_text_is_text_on_the_page_and_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert hostile().to_json().isascii()
    text = page(hostile())
    assert "<img" not in text and "&lt;img src=x" in text
    assert set(re.findall(r"<(script|iframe|a|img|link)\b", text)) == set()
    for line in result_lines(hostile()):
        say(line)
    assert steers(text) == steers(capsys.readouterr().out) == []


def test_hostile_text_is_text_in_markdown() -> None:
    text = markdown(hostile())
    assert steers(text) == []
    blocks = re.compile(r"^(`{3,})$.*?^\1$", re.MULTILINE | re.DOTALL)
    plain = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", blocks.sub("", text))  # code shows its text as it is
    shown = re.sub(r"&#\d+;", "", plain)
    assert not re.search(r"[<>`\[\]@]|http:|javascript|\*\*b", shown)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines} == {8}
    assert sum(line.startswith("### ") for line in plain.splitlines()) == 1


def test_markdown_shows_what_was_written() -> None:
    for text in ("a|b", "<b>", "x_y*z", "www.x.invalid", "1.2 (1.1 to 1.3), 3%", "é – ±"):
        assert html.unescape(escaped(text)) == text
    assert len(html.unescape(escaped("x" * 10**6))) == 1001


def test_lists_are_bounded_where_people_read_them() -> None:
    result = replace(gate(PASSED), integrity=tuple(Problem("r", f"problem {at}") for at in range(500)))
    assert len(result_lines(result)) < 30
    assert len(markdown(result).splitlines()) < 130
    assert "and 400 more" in markdown(result)


def test_two_bounds_of_one_row_are_two_gated_rows() -> None:
    row = bench_row(0.9, limit_ratio=bench_row().ratio)
    rows = gated_rows([bench_run(row)], [replace(BUDGET, min_limit_ratio=0.5)])[0]
    assert [each.bound for each in rows] == ["max_ratio", "min_limit_ratio"]
    assert rows[0].stored.row == gated(row).stored.row
