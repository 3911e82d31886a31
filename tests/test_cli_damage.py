"""The command line under abuse: hostile text, full disks, missing libraries, damaged folders, impatient users.

Invariants:
- Whatever happens around a run, its verdict is printed and kept, or the command ends before it runs.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from literal_record import FAILED, FOREIGN

from kvcheck.commands.main import run
from kvcheck.commands.terminal import finding_lines
from kvcheck.core.report.store import RunStore
from kvcheck.core.report.to_html import render

SMALL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "1", "--seed", "1", "--no-reports"]
STEERING = "\x1b]0;owned\x07\x1b[31m\x9b31m\rfake\nkvcheck: PASS\u202e\u2028\x7f\x00"


def steers(text: str) -> list[str]:
    """Characters in `text` that a terminal obeys or a reader does not see, but line ends."""
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char != "\n"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "retract-resume:shape=llama-3-tiny,trace=%1b]0;owned%07%0akvcheck: PASS"],
        ["replay", "retract-resume:shape=llama-3-tiny%1b[31m"],
        ["replay", f"{STEERING}:shape=llama-3-tiny"],
        ["stress", "--trace", STEERING.replace("\0", "")],
        ["stress", "--shape", STEERING],
        ["report", STEERING.replace("\0", "")],
        [STEERING],
    ],
)
def test_text_from_outside_does_not_steer_the_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvcheck: ") and printed.err.count("\n") == 1, printed.err
    assert steers(printed.err) == []


def test_a_trace_with_a_hostile_name_and_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "\x1b[31mred\nkvcheck: PASS.jsonl"
    path.write_text('{"\\u001b[31m\\n": 1}\n', encoding="utf-8")
    assert run([*SMALL, "--trace", str(path), "--out", str(tmp_path / "runs")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and steers(printed.err) == []
    assert "\\x1b[31mred\\nkvcheck: PASS.jsonl:1" in printed.err


def test_a_stored_record_does_not_steer_the_terminal_or_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = replace(FOREIGN, buffer=STEERING, message=STEERING, schedule=f"x:{STEERING}")
    record = replace(FAILED, findings=(hostile,), warnings=(STEERING,), repro=STEERING)
    record = replace(record, evidence=replace(record.evidence, words_verified={STEERING: 3}))
    RunStore(tmp_path).save(record)
    assert run(["replay", record.run_id, "--out", str(tmp_path)]) == 2
    assert steers(capsys.readouterr().err) == []
    page = render(record)
    assert steers(page) == []
    assert "\\x1b[31m\\x9b31m\\rfake" in page


def test_json_on_stdout_is_plain_and_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = str(tmp_path / "é\udcff\x9b")
    assert run([*SMALL, "--format", "json", "--out", odd]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii() and steers(printed) == []
    (path,) = Path(odd).glob("*/run.json")
    assert json.loads(printed) == json.loads(path.read_text(encoding="utf-8"))


def test_a_finding_of_another_version_is_shown() -> None:
    assert finding_lines(1, replace(FOREIGN, code="KV777"))[0].startswith(" 1  KV777 unknown code")
