"""The command line under abuse: hostile text, full disks, missing libraries, damaged folders, impatient users.

Invariants:
- Whatever happens around a run, its verdict is printed and kept, or the command ends before it runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from literal_record import FAILED, FOREIGN

from kvcheck.commands import main as module
from kvcheck.commands.main import run
from kvcheck.commands.terminal import finding_lines
from kvcheck.core.report.store import RunStore
from kvcheck.core.report.to_html import render

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
FULL = Path("/dev/full")
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


def shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A shell line in which "$KVCHECK" is the program."""
    return subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVCHECK": f"{sys.executable} -m kvcheck"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full on this machine")
@pytest.mark.parametrize("command", ["list shapes", "--help", "--version", "list --help", " ".join(SMALL)])
def test_a_full_disk_behind_stdout_is_no_crash(command: str, tmp_path: Path) -> None:
    ended = shell(f"$KVCHECK {command} >/dev/full", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvcheck: cannot write to stdout: ") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$KVCHECK list shapes >&-", 0),
        ("$KVCHECK list shapes >&- 2>&- <&-", 0),
        ("$KVCHECK nope 2>&-", 2),
        (f"$KVCHECK {' '.join(SMALL)} >&- 2>&-", 0),
        (f"$KVCHECK {' '.join(SMALL)} --requests 1 >&-", 4),
        ("$KVCHECK nope 2>/dev/full", 2),
        ("{ $KVCHECK --help; echo $? >code; } | true; exit $(cat code)", 141),
    ],
)
def test_closed_and_broken_streams_leave_the_exit_code(line: str, code: int, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert (ended.returncode, ended.stderr) == (code, "")
    for path in tmp_path.glob("reports/runs/*/run.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["exit_code"] == code


def test_the_third_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    handler = module._Interrupts()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    handler(signal.SIGINT, None)
    assert left == []
    handler(signal.SIGINT, None)
    assert left == [130]
