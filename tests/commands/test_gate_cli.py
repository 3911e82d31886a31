"""`kvcheck gate` from outside: exit codes, one-line refusals, fresh rounds, interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.gate import bench_row, bench_run, of_this_build
from rigs.literal_record import FAILED, PASSED, UNJUDGED

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError, WrongOutput
from kvcheck.core.base.record import BenchRow, RunRecord
from kvcheck.core.bench.arms import Arm, ArmComparison, Point
from kvcheck.core.bench.run import BenchPlan, key, only
from kvcheck.core.run.store import RunStore

BUDGET = '[[budget]]\ncase = "metadata-read"\narm = "packed"\nbaseline = "views"\nmax_ratio = 1.0\n'
ROW = bench_row(1.2, case="metadata-read")
SLOW, FAST = ROW, bench_row(0.9, case="metadata-read")
Bench = Callable[..., tuple[BenchRow, ...]]


def stored(folder: Path, *records: RunRecord) -> list[str]:
    """Arguments that name these runs, kept under `folder`, and a budget file where one has a price."""
    (folder / "budgets.toml").write_text(BUDGET, encoding="utf-8")
    for record in records:
        RunStore(folder / "runs").save(of_this_build(record))
    budget = ["--budget", str(folder / "budgets.toml")]
    return ["gate", *(record.run_id for record in records), "--out", str(folder / "runs"), *budget]


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
    command = [*stored(tmp_path, *records), *options]
    assert run(command) == exit_code
    printed = capsys.readouterr()
    assert printed.out.endswith(f" exit {exit_code}\n")
    assert len(plans) == len(answers)
    assert ("passes by --on-inconclusive warn" in printed.err) is ("warn" in options)


def test_json_is_alone_on_stdout_and_equal_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, SLOW)
    command = [*stored(tmp_path, bench_run(SLOW)), "--format", "json"]
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
    command = stored(tmp_path, bench_run(SLOW, plan={"shape": "llama-3-tiny", "cases": [SLOW.case]}))
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
    assert run(stored(tmp_path, bench_run(SLOW, **changed))) == 4
    assert "recorded elsewhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (
            WrongOutput("metadata row: 3 of 4 values are wrong"),
            1,
            "measured again: metadata row: 3 of 4 values are wrong",
        ),
        (UsageError("unknown case"), 4, "not measured again: unknown case"),
    ],
)
def test_fresh_rounds_that_cannot_be_measured(
    error: Exception,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong output is a failure of integrity; a case that this version lacks leaves it open."""
    measured(monkeypatch, error)
    assert run(stored(tmp_path, bench_run(SLOW))) == code
    assert told in capsys.readouterr().out


def test_an_interrupt_while_measuring_exits_130_with_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, KeyboardInterrupt())
    assert run(stored(tmp_path, PASSED, bench_run(SLOW))) == 130
    printed = capsys.readouterr().out
    assert "interrupted: partial" in printed and printed.endswith(" exit 130\n")


def test_a_folder_that_cannot_be_written_is_enough_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = stored(tmp_path, PASSED, bench_run(FAST))
    (tmp_path / "runs").chmod(0o500)
    assert run(command) == 0
    assert capsys.readouterr().out.endswith(" exit 0\n")
    assert len([*(tmp_path / "runs").iterdir()]) == 2


def _arm(memory: object) -> Arm:
    return Arm(call=lambda: None, check=lambda: None)


def _points() -> list[Point]:
    made = dict.fromkeys(("a", "b", "c", "d"), _arm)
    rows = (ArmComparison(arm="b", baseline="a"), ArmComparison(arm="c", baseline="b", limit="d", name="c-to-b"))
    return [Point(case="x", size=size, shape=None, bytes=None, makers=made, comparisons=rows) for size in ("1", "2")]


def test_only_what_is_wanted_is_measured_again() -> None:
    (point,) = only(_points(), [key(bench_row(case="x", size="2", arm="c-to-b", baseline="b", shape=None))])
    assert (point.size, list(point.makers)) == ("2", ["a", "b", "c", "d"])
    assert [row.name for row in point.comparisons] == ["c-to-b"]
    (point,) = only(_points(), [("x", "1", "b", "a", None)])
    assert list(point.makers) == ["a", "b"]
    assert only(_points(), []) == []
