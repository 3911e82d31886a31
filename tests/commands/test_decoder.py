"""`kvcheck stress --decoder`: the decoder is in record, line and replay; what it cannot decode is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.run.plan import parse_line


@pytest.mark.schedules
def test_known_answers_pass_and_the_record_says_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "retract-resume", "--decoder", "known-answer", "--shape", "llama-answers", "--seed", "1"]
    assert run([*command, "--schedules", "3", "--no-reports", "--jobs", "1", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    (path,) = tmp_path.glob("*/run.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    (line,) = record["plan"]["cells"]
    assert parse_line(line).decoder == "known-answer"
    words = record["scenarios"][0]["evidence"]["words_verified"]
    assert words["k"] and words["v"] and words["metadata"]


@pytest.mark.schedules
def test_answers_that_depend_on_loaded_pages_are_the_evidence_of_the_host_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "hicache", "--decoder", "known-answer", "--shape", "llama-answers", "--seed", "1"]
    assert run([*command, "--schedules", "3", "--no-reports", "--jobs", "1", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    (path,) = tmp_path.glob("*/run.json")
    words = json.loads(path.read_text(encoding="utf-8"))["scenarios"][0]["evidence"]["words_verified"]
    assert 0 < words["host:k"] == words["host:v"] < words["k"]


@pytest.mark.schedules
def test_a_mutant_is_shown_by_the_decoder_of_its_card_and_its_line_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "--mutant", "length-without-own-token", "--seed", "1", "--schedules", "3", "--no-reports"]
    assert run([*command, "--jobs", "1", "--out", str(tmp_path)]) == 1
    assert "the known answer has" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/run.json")
    finding = json.loads(path.read_text(encoding="utf-8"))["findings"][0]
    assert (finding["code"], parse_line(finding["schedule"]).decoder) == ("KV501", "known-answer")
    assert run(["replay", finding["schedule"], "--times", "2"]) == 1
    assert "identical each time" in capsys.readouterr().out
