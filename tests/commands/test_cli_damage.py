"""The command line under abuse: hostile text, full disks, missing libraries, damaged folders, impatient users."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.literal_record import FAILED, FOREIGN

from kvcheck.commands import interrupts
from kvcheck.commands.interrupts import Interrupts, verdict_stands
from kvcheck.commands.main import run
from kvcheck.core.report import WRITERS, destinations
from kvcheck.core.report.screen import cause_lines
from kvcheck.core.report.to_html import render
from kvcheck.core.run.store import RunStore
from kvcheck.core.stress.workload import traces

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
FULL = Path("/dev/full")
SMALL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", "--seed", "1", "--no-reports"]
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


@pytest.mark.schedules
def test_json_on_stdout_is_plain_and_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = str(tmp_path / "é\udcff\x9b")
    assert run([*SMALL, "--format", "json", "--out", odd]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii() and steers(printed) == []
    (path,) = Path(odd).glob("*/run.json")
    assert json.loads(printed) == json.loads(path.read_text(encoding="utf-8"))


def test_a_finding_of_another_version_is_shown() -> None:
    record = replace(FAILED, findings=(replace(FOREIGN, code="KV777"),))
    assert cause_lines(record, 120, {}, is_kept=True)[0].startswith(" ✘ 1  KV777 unknown code")


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


@pytest.mark.processes
@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full on this machine")
@pytest.mark.parametrize("command", ["list shapes", "--help", "--version", "list --help", " ".join(SMALL)])
def test_a_full_disk_behind_stdout_is_no_crash(command: str, tmp_path: Path) -> None:
    with FULL.open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kvcheck", *command.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvcheck: cannot write to stdout: ") and ended.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$KVCHECK list shapes 2>/dev/null >&-", 2),
        ("$KVCHECK nope 2>&-", 2),
        (f"$KVCHECK {' '.join(SMALL)} >&- 2>&- <&-", 2),
        (f"$KVCHECK {' '.join(SMALL)} 2>&- <&- >/dev/null", 0),
        ("$KVCHECK nope 2>/dev/full", 2),
        ("{ $KVCHECK --help; echo $? >code; } | true; exit $(cat code)", 141),
    ],
)
def test_closed_and_broken_streams_leave_the_exit_code(line: str, code: int, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert (ended.returncode, ended.stderr) == (code, "")
    for path in tmp_path.glob("reports/runs/*/run.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["exit_code"] == code


def test_an_interrupt_within_a_long_import_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long_import.py").write_text(
        "import sys, time\nfrom kvcheck.commands.interrupts import Interrupts\nInterrupts()(2, sys._getframe())\n"
        "for _ in range(30): time.sleep(0.02)\nDONE = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("long_import")
            time.sleep(5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sys.modules["long_import"].DONE
    assert capsys.readouterr().err == "kvcheck: interrupted: it ends as soon as the libraries are loaded\n"


def test_the_third_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    handler = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)
    handler(signal.SIGINT, None)
    assert left == []
    handler(signal.SIGINT, None)
    assert left == [130]


def test_an_interrupt_that_waits_for_an_import_does_not_outlive_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (*interrupts.NUMBERS, signal.SIGALRM)]
    monkeypatch.setattr(interrupts, "would_be_lost", lambda frame: True)
    try:
        with verdict_stands():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        assert [signal.getsignal(number) for number in interrupts.NUMBERS] == before[:2]
    finally:
        signal.signal(signal.SIGALRM, before[2])


# Reports that cannot be made


BROKEN = ["stress", "--mutant", "offload-skips-index-buffer", "--seed", "1", "--schedules", "1", "--no-reports"]
BROKEN += ["--requests", "12"]


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
def test_a_report_that_fails_after_the_run_leaves_the_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "late"

    def in_the_way(record: object, path: Path) -> None:
        target.rmdir()
        target.touch()
        WRITERS.load("json")(FAILED, target / "run.json")

    monkeypatch.setattr("kvcheck.core.report.to_csv.write", in_the_way)
    assert run([*BROKEN, "--out", str(tmp_path / "runs"), "-o", f"csv={target}"]) == 1
    printed = capsys.readouterr()
    assert "KV102" in printed.out and printed.out.endswith(" exit 1\n")
    assert printed.err.startswith(f"kvcheck: warning: no csv report at {target}: cannot write")
    (path,) = (tmp_path / "runs").glob("*/run.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["complete"], record["exit_code"], len(record["warnings"])) == (True, 1, 1)


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
@pytest.mark.parametrize("library", ["jinja2", "pandas", "matplotlib"])
def test_a_missing_library_keeps_the_verdict(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == library or name.startswith(
            tuple(f"kvcheck.core.report.{each}" for each in ("to_", "words", "templates", "charts", "price"))
        ):
            package, _, module = name.rpartition(".")
            if package in sys.modules:  # an import puts the module there too; both are put back together
                monkeypatch.setattr(sys.modules[package], module, sys.modules[name])
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    out = ["--out", str(tmp_path)]
    assert run([*BROKEN, "--reports", *out]) == 1
    printed = capsys.readouterr()
    assert "KV102" in printed.out and printed.out.endswith(" exit 1\n")
    assert printed.err.count("\n") == 1 and printed.err.endswith(f"; next: pip install {library}\n")
    (path,) = tmp_path.glob("*/run.json")
    before = path.read_text(encoding="utf-8")
    assert json.loads(before)["exit_code"] == 1
    formats = {"jinja2": "html", "pandas": "csv", "matplotlib": "html"}
    asked = ["-o", f"{formats[library]}={tmp_path / 'asked'}"]
    for command in ([*BROKEN, *out, *asked], ["report", str(path), *asked]):
        assert run(command) == 4
        printed = capsys.readouterr()
        assert printed.out == "" and f"next: pip install {library}" in printed.err
    assert [entry.name for entry in tmp_path.iterdir()] == [path.parent.name]


@pytest.mark.parametrize("format_name", WRITERS.names())
@pytest.mark.parametrize("name", ["new", "new.csv", "folder", "folder.csv"])
def test_destinations_are_what_a_writer_writes(format_name: str, name: str, tmp_path: Path) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    said = destinations(format_name, tmp_path / name)
    WRITERS.load(format_name)(FAILED, tmp_path / name)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(said)


@pytest.mark.schedules
def test_resume_skips_damaged_runs_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    assert run(command) == 0
    (path,) = tmp_path.glob("*/run.json")
    raw = {**json.loads(path.read_text(encoding="utf-8")), "complete": False, "exit_code": 130}
    path.write_text(json.dumps(raw), encoding="utf-8")
    for name, text in (("99990101-a", '{"schema_version": "1"'), ("99990101-b", "[]"), ("99990101-c", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text, encoding="utf-8")
    (tmp_path / "99990101-d").mkdir()
    (tmp_path / "a file").touch()
    capsys.readouterr()
    assert run([*command, "--resume"]) == 0
    printed = capsys.readouterr()
    assert f"resuming {raw['run_id']}: done 1 of 1 cell" in printed.out
    assert printed.err.count("kvcheck: warning: --resume skips a run: ") == printed.err.count("\n") == 3
    newest = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("2*/run.json") if file != path]
    assert [len(record["warnings"]) for record in newest] == [3]


def test_a_trace_of_more_requests_than_content_can_tell_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n' * 4, encoding="utf-8")
    monkeypatch.setattr(traces, "MAX_REQUESTS", 3)
    assert len(traces.read_trace(path, 3)) == 3
    assert run([*SMALL, "--trace", str(path)]) == 2
    assert "expected at most 3 requests; use --requests" in capsys.readouterr().err
