"""`kvcheck stress --seeds` from outside: it stops, goes on, and has one record whoever ran its batches."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rigs.live_processes import children_of, poll

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.stress.seeds.batches import LEDGER

ROOT = Path(__file__).parents[2]
CELLS = ["retract-resume", "--shape", "llama-3-micro", "--shape", "deepseek-v3-micro", "--requests", "3"]
SMALL = ["stress", *CELLS, "--strategy", "answers:1", "--schedules", "1", "--no-reports"]
MUTANT = ["stress", "--mutant", "offload-skips-index-buffer", "--shape", "glm-5.1-micro", "--no-reports"]


def newest(out: Path) -> Path:
    """The folder of the last run."""
    return max(
        (path for path in out.iterdir() if (path / "run.json").is_file()),
        key=lambda path: (path / "run.json").stat().st_mtime,
    )


def without_time(record: RunRecord) -> object:
    """The verdicts, evidence and findings of a record."""
    rows = [dataclasses.replace(row, duration_s=0.0) for row in record.scenarios]
    findings = [dataclasses.replace(each, id="", cause=None, story=None) for each in record.findings]
    return rows, findings, record.verdict, record.exit_code, record.evidence, record.identity, record.complete


def begun(out: Path, words: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own, once the first of its batches has ended."""
    command = [sys.executable, "-P", "-m", "kvcheck", *words, "--out", str(out)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert poll(lambda: any(path.stat().st_size for path in out.glob(f"*/{LEDGER}")), 300)
    return parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], object]:
    """The record of a run of so many seeds by one process at one go."""

    @cache
    def judged(seeds: int) -> object:
        out = tmp_path_factory.mktemp("whole")
        assert run([*SMALL, "--seeds", f"1-{seeds}", "--jobs", "1", "--out", str(out)]) == 0
        return without_time(read_record(newest(out)))

    return judged


@pytest.mark.schedules
@pytest.mark.processes
def test_one_process_and_two_have_the_same_record(tmp_path: Path, whole: Callable[[int], object]) -> None:
    assert run([*SMALL, "--seeds", "1-2", "--jobs", "2", "--out", str(tmp_path)]) == 0
    record = read_record(newest(tmp_path))
    assert without_time(record) == whole(2)
    assert contradictions(record) == [] and record.plan["seeds"] == "1-2"
    for row in record.scenarios:
        assert row.coverage is not None
        assert row.coverage.scope == "every schedule within 1 answer of the eager order, of 2 workloads"
        assert row.evidence.traces == row.schedules > 10


@pytest.mark.schedules
@pytest.mark.processes
def test_each_seed_runs_the_schedules_of_a_run_with_that_seed(tmp_path: Path) -> None:
    words = ["stress", *CELLS[:3], "--schedules", "4", "--jobs", "1", "--no-reports"]
    assert run([*words, "--seeds", "4-5", "--out", str(tmp_path / "many")]) == 0
    many = read_record(newest(tmp_path / "many"))
    for seed in ("4", "5"):
        run([*words, "--seed", seed, "--out", str(tmp_path / seed)])
    four, five = (read_record(newest(tmp_path / seed)).evidence for seed in ("4", "5"))
    assert many.evidence == four.plus(five)
    (row,) = many.scenarios
    assert row.coverage is not None and (row.schedules, row.coverage.wanted, row.coverage.floor) == (8, 8, 3)
    assert {"eager", "lazy", "random"} <= {*row.coverage.tried}


@pytest.mark.schedules
@pytest.mark.processes
def test_a_torn_ledger_loses_one_batch_and_a_damaged_run_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--seeds", "1-2", "--jobs", "1", "--out", str(tmp_path)]
    assert run(words) == 0
    first = newest(tmp_path)
    text = (first / LEDGER).read_text()
    (first / LEDGER).write_text(text[:-9])
    assert run([*words, "--max-time", "600", "--resume"]) == 0
    captured = capsys.readouterr()
    assert "3 batches done" in captured.out and "was cut off; that batch runs again" in captured.err
    assert without_time(read_record(newest(tmp_path))) == without_time(read_record(first))
    for folder in tmp_path.iterdir():
        (folder / LEDGER).write_text("{}\n" + text)
    assert run([*words, "--resume"]) == 2
    captured = capsys.readouterr()
    assert "line 1: expected a batch" in captured.err and "no interrupted run in" in captured.err
    assert len([*tmp_path.iterdir()]) == 2, "the refused run left no folder"


@pytest.mark.schedules
@pytest.mark.processes
def test_another_plan_or_another_build_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--jobs", "1", "--out", str(tmp_path)]
    assert run([*words, "--seeds", "1-1"]) in (0, 4)
    for other in ("--seeds 1-2", "--seeds 1-1 --requests 2", "--seeds 1-1 --mutant load-without-pin", "--seed 1"):
        assert run([*words, *other.split(), "--resume"]) == 2, other
    capsys.readouterr()
    path = newest(tmp_path) / "run.json"
    record = read_record(path)
    assert record.identity is not None
    other = dataclasses.replace(record, identity=dataclasses.replace(record.identity, code="0" * 64))
    path.write_text(other.to_json())
    assert run([*words, "--seeds", "1-1", "--resume"]) == 2
    assert "is about something else: kvcheck's code was" in capsys.readouterr().err


@pytest.mark.schedules
@pytest.mark.processes(starts=True)
@pytest.mark.parametrize("who", ["parent", "worker"])
def test_a_kill_loses_no_batch_that_had_ended(tmp_path: Path, who: str, whole: Callable[[int], object]) -> None:
    words = [*SMALL, "--seeds", "1-4", "--jobs", "2"]
    with begun(tmp_path, words) as parent:
        os.kill(parent.pid if who == "parent" else children_of(parent.pid)[0], signal.SIGKILL)
        parent.communicate(timeout=300)
    folder = newest(tmp_path)
    if who == "parent":
        assert parent.returncode == -signal.SIGKILL and not read_record(folder).complete
        done = (folder / LEDGER).read_text()
        assert run([*words, "--out", str(tmp_path), "--resume"]) == 0
        assert (newest(tmp_path) / LEDGER).read_text().startswith(done), "no batch that had ended ran again"
    else:
        assert parent.returncode == 0, "the batch of the dead worker ran again"
    assert without_time(read_record(newest(tmp_path))) == whole(4)


@pytest.mark.schedules
@pytest.mark.processes(starts=True)
def test_an_interrupted_run_prints_how_to_go_on(tmp_path: Path) -> None:
    with begun(tmp_path, [*SMALL, "--seeds", "1-500", "--jobs", "2"]) as parent:
        parent.send_signal(signal.SIGINT)
        printed, _ = parent.communicate(timeout=120)
    record = read_record(newest(tmp_path))
    assert parent.returncode == record.exit_code == 130 and not record.complete
    assert f" next   {record.repro} --resume" in printed
    assert record.evidence.traces


@pytest.mark.schedules
@pytest.mark.processes
def test_a_mutant_is_found_once_in_its_cell_and_its_line_replays(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    assert run([*MUTANT, "--requests", "3", "--seeds", "1-3", "--jobs", "1", *out]) == 1
    record = read_record(newest(tmp_path))
    causes = [(each.code, each.buffer) for each in record.findings if each.cause is None]
    assert causes[0][0] == "KV304" and len(set(causes)) == len(causes)
    assert record.scenarios[0].verdict is Verdict.FAIL and contradictions(record) == []
    assert record.findings[0].minimal is not None and record.findings[0].story is not None
    assert run(["replay", f"{record.run_id}#1", *out]) == 1


@pytest.mark.schedules
@pytest.mark.processes
def test_a_mutant_that_is_not_found_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "retract-resume",
        "--mutant",
        "load-without-pin",
        "--shape",
        "llama-3-micro",
        "--requests",
        "3",
        "--no-reports",
    ]
    assert run(["stress", *words, "--seeds", "1-2", "--jobs", "1", "--out", str(tmp_path)]) == 4
    record = read_record(newest(tmp_path))
    assert record.verdict is Verdict.UNKNOWN and contradictions(record) == []
    assert "mutant load-without-pin was put back and nothing was found" in (record.scenarios[0].reason or "")
    assert "nothing was found" in capsys.readouterr().out
    assert run(["stress", *words, "--seed", "1", "--schedules", "12", "--out", str(tmp_path)]) == 4
    told = capsys.readouterr().out
    assert " PASS " not in told and "?12" in told


@pytest.mark.schedules
@pytest.mark.processes
def test_a_time_that_is_over_leaves_batches_for_another_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--seeds", "1-2", "--jobs", "1", "--out", str(tmp_path), "--format", "json"]
    assert run([*words, "--max-time", "0.001"]) == 4
    record = read_record(newest(tmp_path))
    assert json.loads(capsys.readouterr().out)["run_id"] == record.run_id
    assert record.complete and {row.verdict for row in record.scenarios} == {Verdict.UNKNOWN}
    assert all(row.coverage and "2 of 2 workloads" in row.coverage.not_tried for row in record.scenarios)


def workers_of(pid: int) -> list[int]:
    """Processes of Ray below this one that run a batch."""
    found = []
    for child in children_of(pid):
        title = Path(f"/proc/{child}/cmdline")
        found += [child] if title.exists() and title.read_bytes().startswith(b"ray::run_in_task") else []
        found += workers_of(child)
    return found


@pytest.mark.ray
@pytest.mark.schedules
@pytest.mark.processes(starts=True)
def test_over_ray_a_killed_worker_loses_nothing_and_the_record_is_the_same(
    tmp_path: Path, whole: Callable[[int], object]
) -> None:
    with begun(tmp_path, [*SMALL, "--seeds", "1-4", "--jobs", "2", "--ray", "local"]) as driver:
        assert poll(lambda: bool(workers_of(driver.pid)), 60)
        os.kill(workers_of(driver.pid)[0], signal.SIGKILL)
        printed, complained = driver.communicate(timeout=500)
    assert driver.returncode == 0, complained
    assert printed.splitlines()[0].startswith("kvcheck ") and printed.splitlines()[-1] == " exit 0"
    assert "raylet" not in printed, "what Ray prints goes to stderr"
    assert without_time(read_record(newest(tmp_path))) == whole(4)


def test_without_ray_it_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ray") is not None:
        monkeypatch.setitem(sys.modules, "ray", None)
    assert run([*SMALL, "--seeds", "1-2", "--ray", "local", "--out", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert "--ray needs Ray, which cannot be imported" in printed.err and "pip install 'kvcheck[ray]'" in printed.err
    assert printed.out == "" and not [*tmp_path.iterdir()]
