"""Schedules that are explored or made smaller, and the decoder that they run with."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rigs.server_runs import Commands

from kvcheck.commands.main import run
from kvcheck.core.base.record import Verdict, read_record
from kvcheck.core.run.plan import parse_line

CELL = ("stress", "retract-resume", "--shape", "llama-3-micro", "--seed", "1", "--jobs", "1", "--no-reports")
LINE = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0"
CLEAN = "retract-resume:shape=llama-3-micro,seed=1,schedule=0,requests=2,strategy=answers"
FEW = ("--seed", "1", "--schedules", "3", "--no-reports", "--jobs", "1")


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


@pytest.mark.schedules
def test_a_failing_line_gets_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shrink", LINE]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f" from    {LINE}" and printed[-1] == " exit 1"
    assert printed[-5].startswith(" SHRUNK  retract-resume/glm-5.1-micro: KV304 ")
    assert "1 request, was " in printed[-4] and "2 pages each, was " in printed[-4]
    assert "every answer is yes" in printed[-4] and printed[-3] == "   wait    none missing"
    smallest = printed[-2].removeprefix("   next    kvcheck replay ")
    assert f" fails   {smallest}" in printed, "it was told when it was found"
    assert run(["replay", smallest]) == 1
    assert "STILL FAILS 1/1" in capsys.readouterr().out


@pytest.mark.schedules
def test_json_has_the_smallest_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shrink", LINE, "--format", "json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["line"], row["code"], row["refused"], row["verdict"]) == (LINE, "KV304", [], "fail")
    assert row["requests"] == 1 < row["requests_before"] and row["pages"] == 2 < row["pages_before"]
    assert "requests=1,pages=2" in row["smallest"] and row["wait"] == "none missing"


@pytest.mark.schedules
def test_a_line_that_passes_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shrink", CLEAN]) == 4
    assert "UNKNOWN  retract-resume/llama-3-micro: nothing was found" in capsys.readouterr().out


@pytest.mark.schedules
def test_where_no_run_is_left_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shrink", LINE, "--runs", "1"]) == 1
    assert "NOT SMALLER  retract-resume/glm-5.1-tiny: KV304" in capsys.readouterr().out


DEVICE = "hicache:shape=llama-3-tiny,mutant=gate-waits-wrong-entry,backend={0},device={0},strategy=delay,seed=1,"


@pytest.mark.schedules
def test_the_line_of_a_cpu_that_is_named_for_one_of_a_device_gets_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["shrink", DEVICE.format("threads") + "schedule=0,choices=hicache.load"]) == 2
    _, _, command = capsys.readouterr().err.partition("next: kvcheck shrink ")
    assert run(["shrink", command.partition(", the same")[0]]) == 1
    assert "SHRUNK  hicache/llama-3-micro: KV201" in capsys.readouterr().out


@pytest.mark.schedules
@pytest.mark.parametrize("scenario", ["retract-resume", "hicache"])
def test_known_answers_pass_and_the_record_says_what_was_asked(scenario: str, kvcheck: Commands) -> None:
    """Answers that depend on loaded pages are the evidence of the host tier."""
    code, said = kvcheck.kept("stress", scenario, "--decoder", "known-answer", "--shape", "llama-answers", *FEW)
    assert code == 0, said
    (line,) = kvcheck.record().plan["cells"]
    assert parse_line(line).decoder == "known-answer"
    words = kvcheck.record().evidence.words_verified
    assert words["k"] and words["v"] and (scenario == "hicache" or words["metadata"])
    assert scenario != "hicache" or 0 < words["host:k"] == words["host:v"] < words["k"]


@pytest.mark.schedules
def test_a_mutant_is_shown_by_the_decoder_of_its_card_and_its_line_replays(kvcheck: Commands) -> None:
    code, said = kvcheck.kept("stress", "--mutant", "length-without-own-token", *FEW)
    assert code == 1 and "the known answer has" in said
    finding = kvcheck.record().findings[0]
    assert (finding.code, parse_line(finding.schedule).decoder) == ("KV501", "known-answer")
    code, said = kvcheck.said("replay", finding.schedule, "--times", "2")
    assert code == 1 and "identical each time" in said
