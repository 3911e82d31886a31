"""The command line from outside: exit codes, one-line messages, interrupted runs.

Invariants:
- Commands run through kvcheck.commands.main.run, as the installed script does; only signals and pipes need a process.
- Seeds are fixed, so each verdict below is the same on every machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.literal_record import FOREIGN
from rigs.live_processes import children_of, is_alive
from rigs.schemas import check_fits

from kvcheck.commands import main as module
from kvcheck.commands.doctor import KINDS
from kvcheck.commands.main import run
from kvcheck.core.base.record import to_plain
from kvcheck.core.run.cell import STOPPED
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.workload.shapes import TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named

ROOT = Path(__file__).parents[2]
SMALL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", "--seed", "1", "--no-reports"]
LINE = "retract-resume:shape=llama-3-tiny"
FIXED = ["--seed", "1", "--schedules", "3", "--no-reports"]
LARGE = [name for name in TINY_SHAPES if shape_named(name).index_head_dim]
ENOUGH = "16"
"""Requests with which these shapes, whose index pages are large, do all that a pass takes."""
PATIENCE_S = 60.0

UNUSABLE = {
    "scenario": (["stress", "nope"], "unknown scenario 'nope'; known: retract-resume"),
    "shape": (["stress", "--shape", "glm-5.1-tin"], "did you mean 'glm-5.1-tiny'?"),
    "mutant": (["stress", "--mutant", "nope"], "unknown mutant 'nope'"),
    "strategy": (["stress", "--strategy", "nope"], "unknown strategy 'nope'"),
    "strategy replay": (["stress", "--strategy", "replay"], "use kvcheck replay"),
    "order of a device": (
        ["stress", "--device", "cuda", "--strategy", "random"],
        "--strategy random: expected portfolio, eager or delay with --device cuda, which completes operations in an "
        "order of its own; got random; next: --strategy delay, which holds lanes, or --device cpu",
    ),
    "order of a trace on a device": (
        ["stress", "hicache", "--device", "threads", "--trace", "sample", "--strategy", "lazy"],
        "--strategy lazy: expected portfolio, eager or delay with --device threads",
    ),
    "target": (["stress", "--target", "nope"], "unknown target 'nope'"),
    "transport": (["stress", "--transport", "nope"], "unknown transport 'nope'; known: loopback, tcp, mooncake"),
    "backend": (["stress", "--backend", "nope"], "unknown backend 'nope'"),
    "backend and device": (["stress", "--backend", "cuda"], "--backend cuda does not run on --device cpu"),
    "device": (["stress", "--device", "tpu"], "--device: expected cpu, threads, cuda or cuda:N, got 'tpu'"),
    "format": (["stress", "--format", "nope"], "--format: expected one of text, json, got 'nope'"),
    "ranks": (
        ["stress", "--ranks", "2x2"],
        "--ranks 2x2: retract-resume runs 1x1 only; name pd-transfer or nvlink-aux",
    ),
    "ranks that are none": (["stress", "pd-transfer", "--ranks", "2x"], "expected PREFILLxDECODE, each from 1 to 8"),
    "too many ranks": (["stress", "pd-transfer", "--ranks", "9x1"], "such as 2x2; got '9x1'"),
    "processes of one end": (["stress", "--transport", "tcp"], "--transport tcp: retract-resume runs in one process"),
    "shared memory of one end": (["stress", "hicache", "--transport", "ipc"], "hicache runs in one process"),
    "processes of a device": (
        ["stress", "pd-transfer", "--transport", "tcp", "--device", "cuda"],
        "--device cuda: the ranks of --transport tcp have host memory alone; expected --device cpu, or --transport ipc",
    ),
    "simulated processes": (
        ["stress", "pd-transfer", "--transport", "tcp", "--backend", "simulated"],
        "--backend simulated: --transport tcp runs real processes, in no chosen order",
    ),
    "processes on a device": (
        ["stress", "pd-transfer", "--transport", "mooncake", "--device", "cuda"],
        "--device cuda: the ranks of --transport mooncake have host memory alone; expected --device cpu",
    ),
    "processes over threads": (
        ["stress", "pd-transfer", "--transport", "ipc", "--device", "threads"],
        "--device threads: --transport ipc runs ranks as processes; leave one of them out",
    ),
    "processes of a mutant": (
        ["stress", "--transport", "tcp", "--mutant", "failed-overwritten"],
        "--mutant failed-overwritten: --transport tcp runs real processes",
    ),
    "schedules": (["stress", "--schedules", "0"], "--schedules: expected at least 1, got 0"),
    "requests": (["stress", "--requests", "-1"], "--requests: expected at least 1, got -1"),
    "max time": (["stress", "--max-time", "nan"], "--max-time: expected at least 0.001, got nan"),
    "endless max time": (["stress", "--max-time", "inf"], "--max-time: expected a number, got inf"),
    "too many requests": ([*SMALL, "--requests", "10000001"], "requests: expected at most 10000000, got 10000001"),
    "long trace name": ([*SMALL, "--trace", "x" * 5000], "File name too long"),
    "seed": (["stress", "--seed", "abc"], "--seed: expected a valid integer, got 'abc'"),
    "long seed": ([*SMALL, "--seed", "9" * 30], "--seed: expected an integer of at most 20 digits"),
    "output": (["stress", "-o", "html"], "expected FORMAT=PATH"),
    "output format": (["stress", "-o", "pdf=x.pdf"], "unknown format 'pdf'"),
    "number that is none": (["bench", "--precision", "much"], "--precision: expected a valid number, got 'much'"),
    "mutant misspelt": (
        ["stress", "--mutant", "offload-skip-index-buffer"],
        "did you mean 'offload-skips-index-buffer'?",
    ),
    "beginning of a mutant": (["stress", "--mutant", "offload"], "did you mean 'offload-skips-index-buffer'"),
    "release as a target": (
        ["stress", "--target", "sglang==0.5.23"],
        "next: kvcheck env sglang==0.5.23 DIR, then kvcheck probe sglang:DIR",
    ),
    "engine as a scenario": (["stress", "sglang"], "an installed engine is judged by kvcheck probe sglang"),
    "server as a target": (
        ["stress", "--target", "http://h:1"],
        "a running server is judged by kvcheck live http://h:1",
    ),
    "server without scheme": (["stress", "--target", "h:1"], "a running server is judged by kvcheck live http://h:1"),
    "all of an old line": (
        ["stress", "--target", "http://h:1", "--known-answers", "tiny"],
        "No such option: --known-answers; http://h:1: a running server is judged by kvcheck live http://h:1",
    ),
    "code as an engine": (["probe", "my.own:make"], "code of your own is run by kvcheck stress --target my.own:make"),
    "serve as a case": (["bench", "seal", "serve"], "expected kvcheck bench serve URL"),
    "explain alone": (["explain"], "kinds: oracles, mutants, scenarios, codes"),
    "help of no command": (["help", "stres"], "did you mean 'stress'?"),
    "case": (["stress", "HiCache"], "did you mean 'hicache'?"),
    "option": (["stress", "--nope"], "No such option: --nope"),
    "no server": (["live"], "Missing argument 'URL'"),
    "no engine": (["probe"], "Missing argument 'ENGINE[:ENV]': sglang, vllm, lmcache, mooncake"),
    "command": (["nope"], "no command 'nope'; known: stress"),
    "trace": (["stress", "--trace", "no-such.jsonl"], "trace no-such.jsonl: expected a JSONL file"),
    "selftest mutant": (["selftest", "nope"], "unknown mutant 'nope'"),
    "replay run": (["replay", "nope"], "no run 'nope'"),
    "replay long name": (["replay", "x" * 5000], "no run 'xxx"),
    "replay many requests": (["replay", f"{LINE},requests=99999999999999999999"], "expected at most 10000000"),
    "replay trace with a null": (["replay", f"{LINE},trace=a%00b"], "trace a\\x00b: expected a JSONL file"),
    "replay schedule": (["replay", f"{LINE},schedule=99999999999"], "schedule: expected at most 1000000"),
    "replay choices": (["replay", f"{LINE},strategy=replay,choices=zz!"], "choices are damaged"),
}


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


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_done_exits_2_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = UNUSABLE[name]
    assert run(arguments) == 2
    assert expected in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_resume_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--seed", "1", "--resume", "--out", str(tmp_path)]) == 2
    assert "--resume: no interrupted run in " in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("option", ["--out", "-o"])
def test_a_path_that_cannot_be_written_exits_2(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "page.html"
    where = ["--out", str(inside)] if option == "--out" else ["--out", str(tmp_path / "runs"), "-o", f"html={inside}"]
    assert run([*SMALL, *where]) == 2
    assert "cannot write" in complaint(capsys)


def test_kinds_are_listed_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [*KINDS]
    assert run(["list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [*KINDS]


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
def test_the_sample_is_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--schedules", "1", "--trace", "sample", "--requests", "100", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    (cell,) = only_record(tmp_path)["scenarios"]
    assert cell["evidence"]["requests"] == 100


@pytest.mark.schedules
def test_on_a_device_a_trace_and_its_line_name_an_order_that_the_user_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = ["--device", "threads", "--trace", "sample", "--requests", "40"]
    assert run([*SMALL, *over, "--schedules", "1", "--out", str(tmp_path)]) == 0
    (line,) = only_record(tmp_path)["plan"]["cells"]
    assert "backend=threads" in line and "strategy=random" in line
    assert run(["replay", line]) == 0
    assert run([*SMALL, *over, "--strategy", "random", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("kvcheck: --strategy random: expected portfolio, eager or delay")


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


@pytest.mark.processes
@pytest.mark.parametrize("shape", ["llama-3-fp8-tiny", "qwen3-next-tiny"])
def test_the_fixed_build_has_no_finding(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both pairs of ends, see tests/stress/test_pd_transfer.py."""
    has_companions = bool(shape_named(shape).window_layers or shape_named(shape).state_layers)
    prefix_cache = "hicache-hybrid" if has_companions else "hicache"
    command = ["stress", "retract-resume", prefix_cache, "--shape", shape]
    assert run([*command, *FIXED, "--out", str(tmp_path)]) == 0
    assert passed(tmp_path, capsys) == 2


@pytest.mark.schedules
def test_the_fixed_build_has_no_finding_with_large_index_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "hicache", "--shape", LARGE[0], "--requests", ENOUGH, *FIXED]
    assert run([*command, "--out", str(tmp_path)]) == 0
    assert passed(tmp_path, capsys) == 1


def passed(out: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """How many cells the run under `out` has. Each has passed."""
    record = only_record(out)
    assert record["findings"] == []
    for cell in record["scenarios"]:
        assert (cell["verdict"], cell["code"]) == ("pass", None), cell["reason"]
    assert capsys.readouterr().out.endswith(" exit 0\n")
    return len(record["scenarios"])


@pytest.mark.schedules
def test_selftest_of_one_mutant_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "offload-skips-index-buffer"
    assert run(["selftest", name, "--seed", "1", "--no-reports", "--out", str(tmp_path)]) == 0
    (row,) = only_record(tmp_path)["mutants"]
    assert (row["outcome"], row["killed_by"]) == ("killed", "contract KV304")
    told = capsys.readouterr().out
    assert name in told and f" PASS  1 passed   {row['schedules']} schedule" in told


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
def test_a_begun_cell_is_resumed_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL, "--out", str(tmp_path), "--format", "json"]
    assert run(command) == 0
    whole = json.loads(capsys.readouterr().out)
    (row,) = whole["scenarios"]
    row |= {"verdict": "unknown", "code": "KV990", "reason": STOPPED, "schedules": 2}
    row["evidence"] |= {"schedules": 2}
    row["coverage"] |= {"tried": ["eager", "lazy"]}
    whole["evidence"] |= {"schedules": 2}
    cut = {**whole, "complete": False, "exit_code": 130, "verdict": "unknown"}
    (tmp_path / whole["run_id"] / "run.json").write_text(json.dumps(cut), encoding="utf-8")
    command.remove("--format")
    command.remove("json")
    assert run([*command, "--resume"]) == 0
    told = capsys.readouterr().out
    assert f"resuming {whole['run_id']}: done 0 of 1 cell, 1 begun" in told
    assert "3/3 schedules" in told and "tried eager, lazy, random, audit of footprints, 1 of 4 prefill chunks" in told


@pytest.mark.schedules
def test_an_interrupt_judges_by_the_floor_and_resume_goes_on_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "retract-resume", "--shape", "llama-3-micro", "--shape", "qwen3-next-micro", "--seed", "1"]
    command += ["--schedules", "5", "--jobs", "1", "--no-reports", "--out", str(tmp_path)]
    ran: list[str] = []
    schedule = ScheduleRunner.run

    def interrupted(self: ScheduleRunner, plan: Plan, **given: Any) -> Outcome:
        if len(ran) == 5:  # three of the first cell, and two of the other
            raise KeyboardInterrupt
        ran.append(plan.cell)
        return schedule(self, plan, **given)

    with monkeypatch.context() as pressed:
        pressed.setattr(ScheduleRunner, "run", interrupted)
        assert run(command) == 130
    told = capsys.readouterr().out
    rows = {row["shape"]: row["verdict"] for row in only_record(tmp_path)["scenarios"]}
    enough, short = ran[0].partition("/")[2], ran[-1].partition("/")[2]
    assert rows == {enough: "pass", short: "unknown"} and f" PASS  {ran[0]}" in told and f"  {ran[-1]}" not in told
    assert run([*command, "--resume"]) == 0
    told = capsys.readouterr().out
    assert "done 0 of 2 cells, 2 begun" in told and "10 schedules" in told
    assert told.count(" PASS  retract-resume/") == 2, "each cell has one line"


@pytest.mark.schedules
@pytest.mark.parametrize("fault", ["renamed", "extra finding", "stray finding", "another sum"])
def test_a_run_that_contradicts_itself_is_not_resumed(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with exit 70 for the cell, and passed with the finding, or with counts that nothing had judged."""
    command = [*SMALL, "--out", str(tmp_path)]
    assert run(command) == 0
    cut = only_record(tmp_path) | {"complete": False, "exit_code": 130}
    (row,) = cut["scenarios"]
    if fault == "renamed":
        row["id"] = "retract-resume/nope"
    elif fault.endswith("finding"):
        stray = replace(FOREIGN, scenario="retract-resume", shape="nope" if "stray" in fault else "llama-3-tiny")
        cut["findings"] = [to_plain(stray)]
    else:
        row["evidence"]["resumes"] += 100
    (tmp_path / cut["run_id"] / "run.json").write_text(json.dumps(cut), encoding="utf-8")
    capsys.readouterr()
    assert run([*command, "--resume"]) == 0
    told = capsys.readouterr()
    assert f"--resume skips run {cut['run_id']}, which contradicts itself: " in told.err
    assert "resuming nothing: all cells start anew" in told.out and "3/3 schedules" in told.out


@pytest.mark.schedules
def test_a_pass_below_the_floor_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL, "--out", str(tmp_path)]
    assert run(command) == 0
    cut = only_record(tmp_path) | {"complete": False, "exit_code": 130}
    for row in (cut["scenarios"][0], cut["scenarios"][0]["evidence"], cut["evidence"]):
        row["schedules"] = 1
    (tmp_path / cut["run_id"] / "run.json").write_text(json.dumps(cut), encoding="utf-8")
    capsys.readouterr()
    assert run([*command, "--resume"]) == 0
    told = capsys.readouterr().out
    assert "done 0 of 1 cell, 1 begun" in told and "3/3 schedules" in told


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
