"""`kvcheck stress --answers-within K` runs all of them, says so, and says what is left where it could not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record

CELL = ("stress", "retract-resume", "--shape", "llama-3-micro", "--seed", "1", "--jobs", "1", "--no-reports")


def recorded(out: Path) -> RunRecord:
    """The only run of a folder."""
    (folder,) = out.iterdir()
    return read_record(folder)


@pytest.mark.schedules
def test_a_whole_run_says_of_which_schedules_none_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*CELL, "--answers-within", "1", "--schedules", "1", "--requests", "3", "--out", str(tmp_path)]) == 0
    (row,) = recorded(tmp_path).scenarios
    assert row.coverage is not None
    assert row.coverage.scope == "every schedule within 1 answer of the eager order, of 1 workload"
    assert row.schedules == row.coverage.wanted == row.evidence.traces > 3
    assert f"{row.coverage.scope}; tried answers" in capsys.readouterr().out


@pytest.mark.schedules
def test_a_run_whose_time_was_too_short_is_unknown_and_says_what_is_left(tmp_path: Path) -> None:
    words = [*CELL, "--answers-within", "2", "--schedules", "3", "--max-time", "3", "--out", str(tmp_path)]
    assert run(words) == 4
    (row,) = recorded(tmp_path).scenarios
    assert (row.verdict, row.code) == (Verdict.UNKNOWN, "KV990")
    assert row.coverage is not None and row.coverage.scope is None and row.reason


@pytest.mark.schedules
def test_a_mutant_is_found_and_its_line_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CELL[:1], "--mutant", "load-without-pin", "--shape", "llama-3-micro", "--answers-within", "1"]
    assert run([*words, "--seed", "1", "--no-reports", "--out", str(tmp_path)]) == 1
    finding = recorded(tmp_path).findings[0]
    assert finding.code == "KV202" and len(finding.schedule) < 300
    assert "strategy=answers," in finding.schedule and "choices=none" in finding.schedule
    capsys.readouterr()
    assert run(["replay", finding.schedule, "--out", str(tmp_path)]) == 1


@pytest.mark.schedules
def test_a_resumed_run_still_says_what_an_explored_cell_left_out_nowhere(tmp_path: Path) -> None:
    words = [*CELL, "--answers-within", "0", "--schedules", "3", "--out", str(tmp_path)]
    assert run(words) == 0
    (folder,) = tmp_path.iterdir()
    stopped = dataclasses.replace(read_record(folder), complete=False)
    (folder / "run.json").write_text(stopped.to_json(), encoding="utf-8")
    assert run([*words, "--resume"]) == 0
    scopes = {row.coverage.scope for each in tmp_path.iterdir() for row in read_record(each).scenarios if row.coverage}
    assert scopes == {"every schedule within 0 answers of the eager order, of 3 workloads"}
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.schedules
def test_a_run_within_more_answers_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CELL, "--schedules", "3", "--out", str(tmp_path)]
    assert run([*words, "--answers-within", "0"]) == 0
    (folder,) = tmp_path.iterdir()
    stopped = dataclasses.replace(read_record(folder), complete=False)
    assert stopped.plan["answers_within"] == 0
    (folder / "run.json").write_text(stopped.to_json(), encoding="utf-8")
    for other in (["--answers-within", "1"], ["--strategy", "answers"]):
        assert run([*words, *other, "--resume"]) == 2
        told = f"no interrupted run of this plan and seed; the newest in {tmp_path}: {stopped.repro} --resume"
        assert told in capsys.readouterr().err
