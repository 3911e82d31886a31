"""`kvcheck shrink` from outside: exit codes, what is printed, and one clear line for wrong input."""

from __future__ import annotations

import json

import pytest

from kvcheck.commands.main import run

LINE = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0"
CLEAN = "retract-resume:shape=llama-3-micro,seed=1,schedule=0,requests=2,strategy=answers"


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
