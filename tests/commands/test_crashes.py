"""Errors of the code under test: each is a finding of its cell, and all other cells are judged.

Invariants:
- Faults are put into kvcheck's own cache for the time of a test.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcheck.commands import doctor
from kvcheck.commands.main import run
from kvcheck.core.base.errors import InternalError, StorageError, UsageError
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.pools.allocator import PageAllocator
from kvcheck.core.stress.scenarios import serving
from kvcheck.core.targets.builtin import BuiltinTarget

SHAPES = ["--shape", "llama-3-micro", "--shape", "gpt-oss-micro"]
GIVEN = ["--seed", "1", "--schedules", "3", "--jobs", "1", "--no-reports"]


def judged(out: Path, *cells: str) -> RunRecord:
    """The record of a run that has found something."""
    assert run(["stress", *cells, *GIVEN, "--out", str(out)]) == 1
    (path,) = out.glob("*/run.json")
    record = read_record(path)
    assert record.complete
    return record


def breaking(call: Callable[..., Any], error: BaseException, *, at: int = 1) -> Callable[..., Any]:
    """The call, which raises the error from its n-th time on."""
    count = 0

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count >= at:
            raise error
        return call(*given, **named)

    return broken


@pytest.mark.schedules
@pytest.mark.parametrize("error", [ValueError("no such page"), StorageError("gone"), UsageError("a bad key")], ids=str)
def test_an_error_in_the_reference_run_is_a_finding_of_its_cell(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(BuiltinTarget):
        def build(self, setup: Any) -> Any:
            if setup.shape.window_layers:
                raise error
            return super().build(setup)

    with monkeypatch.context() as fault:
        fault.setattr(serving, "BuiltinTarget", Broken)
        record = judged(tmp_path, "retract-resume", *SHAPES)
        rows = {row.shape: row.verdict for row in record.scenarios}
        assert rows == {"llama-3-micro": Verdict.PASS, "gpt-oss-micro": Verdict.FAIL}
        (finding,) = record.findings
        assert finding.code == "KV902" and str(error) in finding.message and "reference run" in finding.message
        assert run(["replay", finding.schedule]) == 1, capsys.readouterr()
    assert run(["replay", finding.schedule]) == 0


@pytest.mark.schedules
def test_a_store_error_that_escapes_is_a_finding_with_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiCache, "admit", breaking(HiCache.admit, StorageError("the store is gone"), at=9))
    (finding, *_) = judged(tmp_path, "hicache", "--shape", "llama-3-micro").findings
    assert finding.code == "KV902" and "StorageError: the store is gone; in " in finding.message


@pytest.mark.schedules
@pytest.mark.parametrize("error", [IndexError("no id is left"), SystemExit("bye"), CancelledError()], ids=repr)
def test_a_crash_names_its_call_and_its_request(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = PageAllocator.allocate

    def broken(self: PageAllocator, count: int, owner: int) -> Any:
        if self.count < 100:  # the reference run has more room
            raise error
        return allocate(self, count, owner)

    monkeypatch.setattr(PageAllocator, "allocate", broken)
    (finding, *_) = judged(tmp_path, "retract-resume", "--shape", "llama-3-micro").findings
    assert finding.code == "KV902" and type(error).__name__ in finding.message
    assert "broken (test_crashes.py:" in finding.message
    assert finding.request is not None and f"request {finding.request}" in finding.message


@pytest.mark.schedules
def test_a_fault_of_kvcheck_stays_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvcheck.core.stress.runner.reference_outputs", breaking(print, InternalError("a bug")))
    assert run(["stress", "retract-resume", *SHAPES, *GIVEN, "--out", str(tmp_path)]) == 70


@pytest.mark.parametrize("value", ["a text", None, 0], ids=repr)
def test_sys_exit_is_no_pass(
    value: str | int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leaves() -> None:
        raise SystemExit(value)

    monkeypatch.setattr(doctor, "doctor", leaves)
    assert run(["doctor"]) == 70
    assert f"SystemExit: {value}" in capsys.readouterr().err
