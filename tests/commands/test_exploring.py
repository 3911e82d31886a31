"""`kvcheck stress --strategy answers:K` runs all of them, says so, and says what is left where it could not."""

from __future__ import annotations

import dataclasses

import pytest
from rigs.server_runs import Commands

from kvcheck.core.base.record import Verdict, read_record

CELL = ("stress", "retract-resume", "--shape", "llama-3-micro", "--seed", "1", "--jobs", "1", "--no-reports")


@pytest.mark.schedules
def test_a_whole_run_says_of_which_schedules_none_was_left_out(kvcheck: Commands) -> None:
    code, said = kvcheck.kept(*CELL, "--strategy", "answers:1", "--schedules", "1", "--requests", "3", "-v")
    (row,) = kvcheck.record().scenarios
    assert code == 0 and row.coverage is not None
    assert row.coverage.scope == "every schedule within 1 answer of the eager order, of 1 workload"
    assert row.schedules == row.coverage.wanted == row.evidence.traces > 3
    assert f"{row.coverage.scope}; tried answers" in said, "with -v"


@pytest.mark.schedules
def test_a_run_whose_time_was_too_short_is_unknown_and_says_what_is_left(kvcheck: Commands) -> None:
    code, _ = kvcheck.kept(*CELL, "--strategy", "answers:2", "--schedules", "3", "--max-time", "3")
    (row,) = kvcheck.record().scenarios
    assert (code, row.verdict, row.code) == (4, Verdict.UNKNOWN, "KV990")
    assert row.coverage is not None and row.coverage.scope is None and row.reason


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
def test_a_mutant_is_found_and_its_line_replays(kvcheck: Commands) -> None:
    words = ("--mutant", "load-without-pin", "--shape", "llama-3-micro", "--strategy", "answers:1", "--seed", "1")
    assert kvcheck.kept("stress", *words, "--no-reports")[0] == 1
    finding = kvcheck.record().findings[0]
    assert finding.code == "KV202" and len(finding.schedule) < 300
    assert "strategy=answers," in finding.schedule and "choices=none" in finding.schedule
    assert kvcheck.kept("replay", finding.schedule)[0] == 1


@pytest.mark.schedules
def test_a_resumed_run_has_its_scope_and_one_within_more_answers_is_another_run(kvcheck: Commands) -> None:
    words = (*CELL, "--schedules", "3")
    assert kvcheck.kept(*words, "--strategy", "answers:0")[0] == 0
    stopped = dataclasses.replace(kvcheck.record(), complete=False)
    assert stopped.plan["answers_within"] == 0
    (kvcheck.folder / "run.json").write_text(stopped.to_json(), encoding="utf-8")
    for other in (("--strategy", "answers:1"), ("--strategy", "answers")):
        code, said = kvcheck.kept(*words, *other, "--resume")
        told = f"no interrupted run of this plan and seed; the newest in {kvcheck.out}: {stopped.repro} --resume"
        assert code == 2 and told in said
    assert kvcheck.kept(*words, "--strategy", "answers:0", "--resume")[0] == 0
    rows = [row for each in kvcheck.out.iterdir() for row in read_record(each).scenarios]
    assert {row.coverage and row.coverage.scope for row in rows} == {
        "every schedule within 0 answers of the eager order, of 3 workloads"
    }
    assert len(rows) == 2
