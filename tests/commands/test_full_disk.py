"""A disk that is full, and reports that break: what was judged is told, and decides the exit code."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rigs.gate import of_this_build
from rigs.literal_record import FAILED, PASSED

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import RunRecord
from kvcheck.core.run import store
from kvcheck.core.run.store import RunStore

LARGEST = 512
SMALL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", "--seed", "1"]
BROKEN = ["stress", "--mutant", "offload-skips-index-buffer", "--seed", "1", "--schedules", "1", "--requests", "12"]
TWO_CELLS = ["--shape", "glm-5.1-tiny", "--shape", "deepseek-v3.2-tiny"]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than LARGEST bytes: the write after that fails, as on a full disk.

    Python would keep what it has written of a module's bytecode by then, so it writes none.
    """
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = kept


@pytest.mark.usefixtures("as_found")
@pytest.mark.processes
@pytest.mark.schedules
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_finding_is_told_where_no_record_can_be_saved(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with full_disk():
        assert run([*BROKEN, *TWO_CELLS, "--jobs", jobs, "--out", "runs"]) == 1
    printed = capsys.readouterr()
    assert "KV102" in printed.out and "kvcheck replay" in printed.out
    assert printed.out.endswith(" report none: run.json could not be saved whole\n exit 1\n")
    assert printed.err.count("kvcheck: warning: a save of the record failed: cannot write runs/") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.schedules
@pytest.mark.parametrize("command", [SMALL, ["selftest", "offload-skips-index-buffer", "--seed", "1"]])
def test_a_pass_without_a_record_is_no_pass(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        assert run([*command, "--out", str(tmp_path), "--format", "json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["exit_code"]) == ("pass", 2)
    assert any("a save of the record failed: cannot write" in text for text in told["warnings"])


def only_record(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*/run.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def failing_saves(monkeypatch: pytest.MonkeyPatch, fails: Callable[[RunRecord], bool]) -> None:
    save = RunStore.save

    def wrapped(self: RunStore, record: RunRecord) -> Path:
        if fails(record):
            raise UsageError("cannot write run.json: No space left on device")
        return save(self, record)

    monkeypatch.setattr(RunStore, "save", wrapped)


def broken_writer(*_: object) -> None:
    raise ZeroDivisionError("a writer of ours is wrong")


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
@pytest.mark.parametrize(("command", "code"), [(SMALL, 0), (BROKEN, 1)])
def test_reports_that_break_change_no_verdict(
    command: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcheck.core.report.to_csv.write", broken_writer)
    assert run([*command, "--out", str(tmp_path)]) == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f" exit {code}\n")
    assert "no csv report" in printed.err and "ZeroDivisionError: a writer of ours is wrong" in printed.err
    record = only_record(tmp_path)
    assert (record["exit_code"], record["complete"]) == (code, True)
    assert any("ZeroDivisionError" in text for text in record["warnings"])
    assert len([*tmp_path.glob("*/report.html")]) == 1


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
@pytest.mark.parametrize(("command", "code"), [(SMALL, 0), (BROKEN, 1)])
def test_a_saved_record_keeps_its_code_where_the_warnings_cannot_be_added(
    command: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcheck.core.report.to_csv.write", broken_writer)
    failing_saves(monkeypatch, lambda record: any("no csv report" in text for text in record.warnings))
    assert run([*command, "--out", str(tmp_path)]) == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f" exit {code}\n")
    assert "a save of the record failed" in printed.err
    record = only_record(tmp_path)
    assert (record["exit_code"], record["complete"], record["warnings"]) == (code, True, [])


@pytest.mark.schedules
def test_a_save_that_fails_once_is_named_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_saves(monkeypatch, lambda record: not record.complete)
    assert run([*SMALL, "--no-reports", "--out", str(tmp_path)]) == 0
    (told,) = only_record(tmp_path)["warnings"]
    assert told == "a save of the record failed: cannot write run.json: No space left on device"


@pytest.mark.parametrize(("record", "code"), [(PASSED, 0), (FAILED, 1)])
def test_a_page_of_the_gate_that_breaks_changes_no_verdict(
    record: RunRecord, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcheck.core.report.gate.pages.write_markdown", broken_writer)
    path = RunStore(tmp_path).save(of_this_build(record))
    assert run(["gate", str(path), "-o", f"md={tmp_path / 'gate.md'}"]) == code
    printed = capsys.readouterr()
    assert printed.out.endswith(f" exit {code}\n")
    assert "no md report" in printed.err


def test_two_runs_of_one_second_have_a_folder_each(tmp_path: Path) -> None:
    drawn = iter(["a", "a", "b"])
    runs = RunStore(tmp_path)
    assert [runs.claim(lambda: next(drawn)) for _ in range(2)] == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_id_that_is_always_taken_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    path = RunStore(tmp_path).save(FAILED)
    with pytest.raises(UsageError, match=f"{store.DRAWS} times, last {FAILED.run_id}; choose another folder"):
        RunStore(tmp_path).claim(lambda: FAILED.run_id)
    assert path.read_text(encoding="utf-8") == FAILED.to_json()
