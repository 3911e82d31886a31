"""`kvcheck gate` and `kvcheck selftest --aa` from outside: exit codes, one-line refusals, fresh rounds, interruptions.

Invariants:
- What is measured is replaced by literal rows: nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import GREET
from rigs.gate import bench_row, bench_run, of_this_build
from rigs.literal_record import FAILED, PASSED, UNJUDGED
from rigs.live_processes import children_of, is_alive

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError, WrongOutput
from kvcheck.core.base.record import BenchRow, RunRecord
from kvcheck.core.bench.arms import Arm, Comparison, Point
from kvcheck.core.bench.gate_trials import ARMS
from kvcheck.core.bench.plan import BenchPlan
from kvcheck.core.bench.selection import AGAIN, beside_itself, key, only, slowed
from kvcheck.core.report.store import RunStore

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
BUDGET = '[[budget]]\ncase = "metadata-read"\narm = "packed"\nbaseline = "views"\nmax_ratio = 1.0\n'
ROW = bench_row(1.2, case="metadata-read")
SLOW, FAST = ROW, bench_row(0.9, case="metadata-read")
Bench = Callable[..., tuple[BenchRow, ...]]


def stored(folder: Path, *records: RunRecord) -> list[str]:
    """Arguments that name these runs, kept under `folder`, and a budget file."""
    (folder / "budgets.toml").write_text(BUDGET, encoding="utf-8")
    for record in records:
        RunStore(folder / "runs").save(of_this_build(record))
    return ["gate", *(record.run_id for record in records), "--out", str(folder / "runs")]


def measured(monkeypatch: pytest.MonkeyPatch, *answers: BenchRow | BaseException) -> list[BenchPlan]:
    """Measuring gives these answers, one a time; the plans that were asked for."""
    plans: list[BenchPlan] = []

    def fake(plan: BenchPlan, tell: object, **ignored: object) -> tuple[BenchRow, ...]:
        plans.append(plan)
        answer = answers[len(plans) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return (answer,)

    monkeypatch.setattr("kvcheck.core.bench.run.run_bench", fake)
    return plans


@pytest.mark.parametrize(
    ("records", "answers", "options", "exit_code"),
    [
        ((PASSED, bench_run(FAST)), (), [], 0),
        ((PASSED, bench_run(SLOW)), (SLOW,), [], 3),
        ((PASSED, bench_run(SLOW)), (FAST,), [], 4),
        ((PASSED, bench_run(SLOW)), (FAST,), ["--on-inconclusive", "warn"], 0),
        ((PASSED, bench_run(SLOW)), (), ["--fail-over", "0.5"], 0),
        ((FAILED, bench_run(SLOW)), (SLOW,), [], 1),
        ((UNJUDGED, bench_run(FAST)), (), [], 4),
        ((PASSED,), (), [], 4),
    ],
)
def test_the_exit_code_is_that_of_the_worst_part(
    records: tuple[RunRecord, ...],
    answers: tuple[BenchRow, ...],
    options: list[str],
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = measured(monkeypatch, *answers)
    command = [*stored(tmp_path, *records), "--budget", str(tmp_path / "budgets.toml"), *options]
    assert run(command) == exit_code
    printed = capsys.readouterr()
    assert printed.out.endswith(f" exit {exit_code}\n")
    assert len(plans) == len(answers)
    assert ("passes by --on-inconclusive warn" in printed.err) is ("warn" in options)


def test_json_is_alone_on_stdout_and_equal_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, SLOW)
    command = [*stored(tmp_path, bench_run(SLOW)), "--budget", str(tmp_path / "budgets.toml"), "--format", "json"]
    reports = [f"-o{name}={tmp_path / name}" for name in ("json", "md", "html")]
    assert run([*command, *reports]) == 3
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result == json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["exit_code"], result["rows"][0]["verdict"]) == ("slower", 3, "slower")
    for name in ("md", "html"):
        assert "SLOWER" in (tmp_path / name).read_text(encoding="utf-8")


def test_fresh_rounds_are_of_the_recorded_shape_and_have_another_seed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unsure = bench_row(1.05, case="metadata-read", floor=0.08)
    plans = measured(monkeypatch, unsure, SLOW)
    command = [
        *stored(tmp_path, bench_run(SLOW, plan={"shape": "llama-3-tiny", "cases": [SLOW.case]})),
        "--budget",
        str(tmp_path / "budgets.toml"),
    ]
    assert run([*command, "--seed", "5", "--max-time", "20"]) == 3
    assert [(plan.cases, plan.shape, plan.device, plan.seed) for plan in plans] == [
        (("metadata-read",), "llama-3-tiny", "cpu", 6),
        (("metadata-read",), "llama-3-tiny", "cpu", 7),
    ]
    assert plans[0].max_time_s == 10 and plans[0].rounds_min > 15
    assert "measuring 1 row again" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"tool": {"name": "kvcheck", "version": "0"}}, {"environment": {"cpus": 96}}])
def test_a_run_from_elsewhere_cannot_be_confirmed_here(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(monkeypatch) == []
    command = [*stored(tmp_path, bench_run(SLOW, **changed)), "--budget", str(tmp_path / "budgets.toml")]
    assert run(command) == 4
    assert "recorded elsewhere" in capsys.readouterr().out


def test_a_wrong_output_in_fresh_rounds_is_an_integrity_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, WrongOutput("metadata row: 3 of 4 values are wrong"))
    command = [*stored(tmp_path, bench_run(SLOW)), "--budget", str(tmp_path / "budgets.toml")]
    assert run(command) == 1
    assert "measured again: metadata row: 3 of 4 values are wrong" in capsys.readouterr().out


def test_a_case_that_this_version_does_not_have_is_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, UsageError("unknown case"))
    command = [*stored(tmp_path, bench_run(SLOW)), "--budget", str(tmp_path / "budgets.toml")]
    assert run(command) == 4
    assert "not measured again: unknown case" in capsys.readouterr().out


def test_an_interrupt_while_measuring_exits_130_with_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, KeyboardInterrupt())
    command = [*stored(tmp_path, PASSED, bench_run(SLOW)), "--budget", str(tmp_path / "budgets.toml")]
    assert run(command) == 130
    printed = capsys.readouterr().out
    assert "interrupted: partial" in printed and printed.endswith(" exit 130\n")


UNUSABLE = {
    "no run": (["gate"], "Missing argument"),
    "unknown run": (["gate", "nope"], "no run 'nope'"),
    "no budget file": (["gate", "RUN", "--budget", "nope.toml"], "budget file nope.toml"),
    "tol": (["gate", "RUN", "--tol", "nan"], "--tol and --fail-over"),
    "tol above fail-over": (["gate", "RUN", "--tol", "0.5"], "expected 0 <= tol <= fail-over <= 10"),
    "on-inconclusive": (["gate", "RUN", "--on-inconclusive", "no"], "expected one of pass, warn, fail, got 'no'"),
    "format": (["gate", "RUN", "--format", "md"], "expected one of text, json, got 'md'"),
    "output": (["gate", "RUN", "-o", "md"], "expected FORMAT=PATH"),
    "output format": (["gate", "RUN", "-o", "csv=x"], "unknown format of the gate 'csv'; known: json, md, html"),
    "output folder": (["gate", "RUN", "-o", "md=."], "expected the name of a file, got a folder"),
    "output twice": (["gate", "RUN", "-o", "md=x", "-o", "html=x"], "two reports would be written to x"),
    "output nowhere": (["gate", "RUN", "-o", "md=/dev/null/x"], "cannot write"),
    "max time": (["gate", "RUN", "--max-time", "0"], "--max-time: expected at least"),
    "seed": (["gate", "RUN", "--seed", "-1"], "--seed: expected an integer of at least 0, got -1"),
    "trial seed": (["selftest", "--aa", "1", "--seed", "-1"], "--seed: expected an integer of at least 0, got -1"),
    "aa": (["selftest", "--aa", "0"], "--aa: expected at least 1, got 0"),
    "planted alone": (["selftest", "--planted", "20"], "--planted: expected --aa N beside it"),
    "planted": (["selftest", "--aa", "1", "--planted", "-1"], "expected a percentage from 0 to 1000"),
    "planted nan": (["selftest", "--aa", "1", "--planted", "nan"], "expected a percentage from 0 to 1000"),
    "aa on a device": (["selftest", "--aa", "1", "--device", "cuda"], "--device: --aa tries the gate on the CPU"),
    "aa with a time": (["selftest", "--aa", "1", "--max-time", "9"], "--max-time: --aa tries the gate"),
    "aa and a mutant": (["selftest", "failed-overwritten", "--aa", "1"], "--aa tries the gate and no mutants"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_done_exits_2_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RunStore(tmp_path / "reports" / "runs").save(PASSED)
    arguments, expected = UNUSABLE[name]
    assert run([PASSED.run_id if each == "RUN" else each for each in arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert expected in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]


def test_a_folder_that_cannot_be_written_is_enough_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = stored(tmp_path, PASSED)
    (tmp_path / "runs").chmod(0o500)
    assert run(command) == 0
    assert capsys.readouterr().out.endswith(" exit 0\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [PASSED.run_id]


def _arm(memory: object) -> Arm:
    return Arm(call=lambda: None, check=lambda: None)


def _points() -> list[Point]:
    made = dict.fromkeys(("a", "b", "c", "d"), _arm)
    rows = (Comparison(arm="b", baseline="a"), Comparison(arm="c", baseline="b", limit="d", name="c-to-b"))
    return [Point(case="x", size=size, shape=None, bytes=None, makers=made, comparisons=rows) for size in ("1", "2")]


def test_only_what_is_wanted_is_measured_again() -> None:
    (point,) = only(_points(), [key(bench_row(case="x", size="2", arm="c-to-b", baseline="b", shape=None))])
    assert (point.size, list(point.makers)) == ("2", ["a", "b", "c", "d"])
    assert [row.name for row in point.comparisons] == ["c-to-b"]
    (point,) = only(_points(), [("x", "1", "b", "a", None)])
    assert list(point.makers) == ["a", "b"]
    assert only(_points(), []) == []


def test_an_arm_beside_itself_is_the_same_maker() -> None:
    (point,) = beside_itself(_points(), "b", 0)
    assert point.makers["b"] is point.makers[AGAIN] is _arm
    assert (point.baseline, point.comparisons) == ("b", (Comparison(arm=AGAIN, baseline="b"),))
    (point,) = beside_itself(_points(), "b", 20)
    assert _arm not in point.makers.values()  # both carry the clock
    with pytest.raises(UsageError, match="unknown arm 'z'; known: a, b, c, d"):
        beside_itself(_points(), "z", 0)


def slowed_waits(
    monkeypatch: pytest.MonkeyPatch, percent: float, *, call_ns: int, calls: int, step_ns: int
) -> list[int]:
    """What each call of a slowed arm waits, by a clock that goes on by a step whenever it is read."""
    now = [0]

    def reading() -> int:
        now[0] += step_ns
        return now[0]

    def work() -> None:
        now[0] += call_ns

    monkeypatch.setattr("kvcheck.core.bench.selection.time.perf_counter_ns", reading)
    call = slowed(lambda memory: Arm(call=work, check=lambda: None), percent)(None).call  # type: ignore[arg-type]
    waits = []
    for _ in range(calls):
        before = now[0]
        call()
        waits.append(now[0] - before - call_ns - 2 * step_ns)
    return waits


@pytest.mark.parametrize(
    ("percent", "call_ns", "waits"),
    [
        (20, 1_000_000, [200_000, 200_000, 200_000]),
        (20, 10_000, [0, 0, 6_000, 0, 0, 6_000]),
        (20, 0, [0, 0, 0]),
        (0, 1_000_000, [0, 0]),
    ],
)
def test_a_planted_slow_down_waits_for_a_part_of_what_the_calls_took(
    percent: float, call_ns: int, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = slowed_waits(monkeypatch, percent, call_ns=call_ns, calls=len(waits), step_ns=1)
    assert found == pytest.approx(waits, abs=5)


def test_a_slow_down_by_a_coarse_clock_is_not_more_than_was_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = sum(slowed_waits(monkeypatch, 20, call_ns=10_000, calls=60, step_ns=4_000))
    assert waited == pytest.approx(60 * 14_000 * 0.2, abs=5_000)


def test_a_trial_goes_the_way_of_the_gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = bench_row(1.0, case="metadata-read"), SLOW
    plans = measured(monkeypatch, fast, slow, fast, slow, slow)
    assert run(["selftest", "--aa", "3", "--seed", "4", "--format", "json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert [trial["verdict"] for trial in answer["trials"]] == ["ok", "inconclusive", "slower"]
    assert len({plan.seed for plan in plans}) == len(plans)
    assert [plan.cases for plan in plans[:2]] == [(case,) for case, _, _ in ARMS]


@pytest.mark.parametrize(
    ("options", "answers", "exit_code", "line"),
    [
        (["--aa", "1"], (1.0,), 0, "false SLOWER  0 of 1: 0.0%, at most 95.0% (95 %)"),
        (["--aa", "1"], (1.2, 1.2), 4, "false SLOWER  1 of 1: 100.0%, at most 100.0% (95 %)"),
        (
            ["--aa", "1", "--planted", "20"],
            (1.2, 1.2),
            0,
            "1 of 1 slow-downs of 20 %: 100.0%, at least 5.0%",
        ),
        (["--aa", "1", "--planted", "20"], (1.0,), 4, "0 of 1 slow-downs of 20 %: 0.0%, at least 0.0%"),
    ],
)
def test_trials_are_counted_with_their_limit(
    options: list[str],
    answers: tuple[float, ...],
    exit_code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured(monkeypatch, *(bench_row(ratio, case="metadata-read") for ratio in answers))
    assert run(["selftest", *options, "--seed", "1"]) == exit_code
    printed = capsys.readouterr().out
    assert line in printed and printed.endswith(f" exit {exit_code}\n")


def test_trials_that_are_interrupted_say_what_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, KeyboardInterrupt())
    assert run(["selftest", "--aa", "2"]) == 130
    assert "no trial came to its end" in capsys.readouterr().out


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of trials are this shell script."""
    program = folder / "trials"
    program.write_text(f"#!/bin/sh\n{GREET}\n{script}\n", encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.processes
def test_an_interruption_is_told_once_and_not_by_the_trials_process_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "trap 'echo told twice >&2; exit 130' TERM\nsleep .5\nkill -INT $PPID\nfor n in $(seq 500); do sleep .02; done"
    )
    stand_in(tmp_path, script, monkeypatch)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(["selftest", "--aa", "11"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    output, errors = capfd.readouterr()
    assert output.endswith(" exit 130\n") and errors == ""


@pytest.mark.processes
def test_what_a_failed_process_of_trials_said_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, "echo the disk is gone >&2\nexit 3", monkeypatch)
    assert run(["selftest", "--aa", "11"]) == 70
    errors = capfd.readouterr().err
    assert "the disk is gone" in errors and "trials 1 and on: their process ended with status 3" in errors


@pytest.mark.processes
def test_real_trials_run_in_processes_of_their_own_and_end_with_their_parent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcheck", "selftest", "--aa", "11", "--seed", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    found: list[int] = []
    while not found and time.monotonic() < deadline:
        assert process.poll() is None
        found = children_of(process.pid)
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "")
    assert output.endswith(" exit 130\n")
    assert not [pid for pid in found if is_alive(pid)]
