"""The command line from outside: exit codes, one-line messages, interrupted runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.literal_record import FOREIGN
from rigs.live_processes import children_of, is_alive
from rigs.schemas import check_fits

from kvcheck.commands import main as module
from kvcheck.commands.main import run
from kvcheck.core.base.record import read_record, to_plain
from kvcheck.core.run.cell import STOPPED
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner

ROOT = Path(__file__).parents[2]
SMALL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", "--seed", "1", "--no-reports"]
PATIENCE_S = 60.0


def only_record(out: Path) -> dict[str, Any]:
    """The one run under `out`, checked against the schema."""
    (path,) = out.glob("*/run.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_fits(record)
    return record


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints; nothing on stdout."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvcheck: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


@pytest.mark.parametrize("text", ["", '{"timestamp": 1, "input_len', "[]\n", "\x00\n"])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_damaged_trace_exits_2_before_anything_runs(
    text: str, jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "bad.jsonl", tmp_path / "out"
    trace.write_text(text, encoding="utf-8")
    assert run(["stress", "--trace", str(trace), "--jobs", jobs, "--out", str(out)]) == 2
    assert str(trace) in complaint(capsys)
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": "1", "run'])
@pytest.mark.parametrize("command", ["report", "replay"])
def test_a_damaged_record_exits_2(command: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    assert run([command, str(path)]) == 2
    assert str(path) in complaint(capsys)


@pytest.mark.schedules
def test_a_pass_exits_0_and_stdout_is_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--format", "json", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    record = only_record(tmp_path)
    assert json.loads(printed.out) == record
    assert (record["verdict"], record["complete"], record["exit_code"]) == ("pass", True, 0)
    assert record["argv"][: len(SMALL)] == SMALL


@pytest.mark.schedules
def test_on_a_device_a_trace_and_its_line_name_an_order_that_the_user_may_not(tmp_path: Path) -> None:
    over = ["--device", "threads", "--trace", "sample", "--requests", "40"]
    assert run([*SMALL, *over, "--schedules", "1", "--out", str(tmp_path)]) == 0
    (line,) = only_record(tmp_path)["plan"]["cells"]
    assert "backend=threads" in line and "strategy=random" in line
    assert run(["replay", line]) == 0
    assert run([*SMALL, *over, "--strategy", "random", "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("arguments", [SMALL, ["stress", "nvlink-aux", "--transport", "ipc"]])
def test_cuda_without_a_device_exits_4(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run([*arguments, "--device", "cuda", "--out", str(tmp_path / "runs")]) == 4
    assert "needs a CUDA device" in complaint(capsys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.schedules
def test_a_run_too_short_to_judge_exits_4_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--requests", "1", "--out", str(tmp_path)]) == 4
    assert "KV990" in capsys.readouterr().out
    (cell,) = only_record(tmp_path)["scenarios"]
    assert cell["verdict"] == "unknown" and cell["reason"]


def test_a_crash_of_kvcheck_exits_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(module.COMMANDS, "doctor", ("kvcheck.commands.doctor:no_such_function", "Broken."))
    assert run(["doctor"]) == 70
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvcheck: kvcheck itself failed (AttributeError")


@pytest.mark.schedules
def test_selftest_of_one_mutant_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "offload-skips-index-buffer"
    assert run(["selftest", name, "--seed", "1", "--no-reports", "--out", str(tmp_path)]) == 0
    (row,) = only_record(tmp_path)["mutants"]
    assert (row["outcome"], row["killed_by"]) == ("killed", "contract KV304")
    told = capsys.readouterr().out
    assert name in told and f" PASS  1 mutant killed; {row['schedules']} schedule" in told


@pytest.mark.processes
@pytest.mark.parametrize(
    ("jobs", "signals"),
    [
        ("1", (signal.SIGINT,)),
        ("1", (signal.SIGTERM,)),
        ("1", (signal.SIGINT, signal.SIGTERM)),
        ("2", (signal.SIGINT, signal.SIGTERM)),
    ],
    ids=str,
)
def test_an_interrupt_exits_130_with_what_was_judged(
    jobs: str, signals: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    command = [*SMALL, "--shape", "gpt-oss-tiny", "--schedules", "2000", "--jobs", jobs, "--out", str(tmp_path)]
    command.remove("--no-reports")
    command += ["--max-time", "600"]  # it ends also where this test is killed
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcheck", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("*/run.json")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    before = children_of(process.pid)
    assert len(before) == (2 if jobs == "2" else 0)
    for number in signals:
        process.send_signal(number)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "kvcheck: interrupted: what was judged is kept\n")
    assert output.endswith("/report.html\n exit 130\n")
    record = only_record(tmp_path)
    assert f" next   {record['repro']} --resume\n" in output
    assert (tmp_path / record["run_id"] / "report.html").exists()
    assert (record["complete"], record["exit_code"]) == (False, 130)
    assert record["evidence"]["schedules"] >= 1
    assert not [pid for pid in before if is_alive(pid)]


@pytest.mark.schedules
def test_an_interrupt_judges_by_the_floor_and_resume_goes_on_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "stress",
        "retract-resume",
        "--shape",
        "llama-3-micro",
        "--shape",
        "qwen3-next-micro",
        "--schedules",
        "5",
    ]
    command += ["--jobs", "1", "--no-reports", "--out", str(tmp_path)]
    ran: list[str] = []
    schedule = ScheduleRunner.run

    def interrupted(self: ScheduleRunner, plan: Plan, **given: Any) -> Outcome:
        if len(ran) == 5:  # three of the first cell, and two of the other
            raise KeyboardInterrupt
        ran.append(plan.cell)
        return schedule(self, plan, **given)

    with monkeypatch.context() as pressed:
        pressed.setattr(ScheduleRunner, "run", interrupted)
        assert run([*command, "--seed", "123"]) == 130
    told = capsys.readouterr().out
    rows = {row["shape"]: row["verdict"] for row in only_record(tmp_path)["scenarios"]}
    enough, short = ran[0].partition("/")[2], ran[-1].partition("/")[2]
    assert rows == {enough: "pass", short: "unknown"} and " ✔3" in told and " ·2" in told
    assert run([*command, "--resume", "--max-time", "300"]) == 0
    told = capsys.readouterr().out
    assert "done 0 of 2 cells, 2 begun" in told and "10 schedules" in told and "   seed 123   " in told
    assert told.count("✔5") == 2


Cut = dict[str, Any]


def begun(cut: Cut) -> None:
    (row,) = cut["scenarios"]
    row |= {"verdict": "unknown", "code": "KV990", "reason": STOPPED}
    row["coverage"] |= {"tried": ["eager", "lazy"]}
    cut["verdict"] = "unknown"
    below_the_floor(cut)


def below_the_floor(cut: Cut) -> None:
    for row in (cut["scenarios"][0], cut["scenarios"][0]["evidence"], cut["evidence"]):
        row["schedules"] = 2


def renamed(cut: Cut) -> None:
    cut["scenarios"][0]["id"] = "retract-resume/nope"


def with_a_finding(cut: Cut, shape: str = "llama-3-tiny") -> None:
    cut["findings"] = [to_plain(replace(FOREIGN, scenario="retract-resume", shape=shape))]


def with_another_sum(cut: Cut) -> None:
    cut["scenarios"][0]["evidence"]["resumes"] += 100


CONTRADICTS = "which contradicts itself: "


@pytest.mark.schedules
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (begun, "done 0 of 1 cell, 1 begun"),
        (below_the_floor, "done 0 of 1 cell, 1 begun"),
        (renamed, CONTRADICTS),
        (with_a_finding, CONTRADICTS),
        (partial(with_a_finding, shape="nope"), CONTRADICTS),
        (with_another_sum, CONTRADICTS),
    ],
)
def test_resume_goes_on_where_a_run_was_unless_its_record_contradicts_itself(
    change: Callable[[Cut], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contradicting one ended with exit 70, or passed with a finding, or with counts that nothing had judged."""
    command = [*SMALL, "--out", str(tmp_path)]
    assert run(command) == 0
    cut = only_record(tmp_path) | {"complete": False, "exit_code": 130}
    change(cut)
    (tmp_path / cut["run_id"] / "run.json").write_text(json.dumps(cut), encoding="utf-8")
    capsys.readouterr()
    assert run([*command, "--resume"]) == 0
    printed = capsys.readouterr()
    assert told in printed.out + printed.err and "✔3" in printed.out
    assert ("all cells start anew" in printed.out) == (told == CONTRADICTS)
    (row,) = read_record(max(tmp_path.glob("*/run.json"), key=lambda path: path.stat().st_mtime)).scenarios
    assert row.coverage is not None and (change is not begun or {"eager", "lazy", "random"} <= {*row.coverage.tried})


@pytest.mark.processes
def test_a_reader_that_left_is_not_a_finding() -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "kvcheck", "list", "codes"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")
