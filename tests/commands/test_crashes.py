"""Errors of the code under test: each is a finding of its cell, and all other cells are judged."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcheck.commands import doctor
from kvcheck.commands.main import run
from kvcheck.core.base.errors import InternalError, StorageError, UnknownVerdict, UsageError
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.cache.pools.allocator import PageAllocator
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios import serving
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.own import load_own

SHAPES = ["--shape", "llama-3-micro", "--shape", "gpt-oss-micro"]
GIVEN = ["--seed", "1", "--schedules", "3", "--jobs", "1", "--no-reports"]


def judged(out: Path, *cells: str) -> RunRecord:
    """The record of a run that has found something."""
    assert run(["stress", *cells, *GIVEN, "--out", str(out)]) == 1
    (path,) = out.glob("*/run.json")
    record = read_record(path)
    assert record.complete
    return record


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
@pytest.mark.parametrize("error", [IndexError("none"), StorageError("x"), SystemExit("bye"), CancelledError()])
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
    def broken(*_: object, **__: object) -> None:
        raise InternalError("a bug")

    monkeypatch.setattr("kvcheck.core.stress.runner.reference_outputs", broken)
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


OWN = """
import errno, os, sys, threading, time
from dataclasses import replace
from kvcheck.core.base.errors import InternalError, UnknownVerdict, UsageError
from kvcheck.core.cache.offload import Offload
from kvcheck.core.stress.targets.target import FIXED

class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")

def ring():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first

def disturb():
    if sys.stdout.closed:
        return
    print("a line of the target")
    os.write(1, b"and another one")
    sys.stdout.close()
    os.chdir("/")
    threading.Thread(target=time.sleep, args=(1e6,)).start()

class Broken(Offload):
    def _table(self):
        {body}
        return super()._table()

def target():
    return replace(FIXED, offload=Broken)
"""
"""A target whose offload does something else first."""
RAISED = {
    "KeyboardInterrupt()": "KeyboardInterrupt",
    "BaseExceptionGroup('two', [KeyboardInterrupt()])": "BaseExceptionGroup: two",
    "NoText()": "NoText",
    "ring()": "ValueError: first",
    "ValueError('x' * 5_000_000)": "ValueError: xxx",
    "RuntimeError('cannot allocate memory: the pool is exhausted')": "RuntimeError: cannot allocate memory",
    "MemoryError('no page is left')": "MemoryError: no page is left",
    "InternalError('of the target')": "InternalError: of the target",
    "UsageError('of the target')": "UsageError: of the target",
    "UnknownVerdict('of the target')": "UnknownVerdict: of the target",
}
"""Errors that a target raises, and how their findings begin."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Puts a target with this body into the current folder, in a module of this name; its own name."""
    monkeypatch.setattr(sys, "path", [at for at in sys.path if not Path(at, "broken_target.py").exists()])
    monkeypatch.chdir(tmp_path)

    sys.modules.pop("broken_target", None)

    def put(body: str, name: str = "broken_target") -> str:
        (tmp_path / f"{name}.py").write_text(OWN.replace("{body}", body))
        return f"{name}:target"

    yield put
    sys.modules.pop("broken_target", None)


def plan_of(name: str) -> Plan:
    return Plan(scenario="retract-resume", shape="llama-3-micro", target=name, seed=1)


@pytest.mark.schedules
@pytest.mark.parametrize("error", RAISED)
def test_any_error_of_a_target_is_a_finding_with_its_place(error: str, own: Callable[..., str]) -> None:
    module = f"raises_{[*RAISED].index(error)}"  # imported by this test alone
    plan = plan_of(own(f"raise {error}", module))
    (finding, *_) = ScheduleRunner(load_own(plan.target)).run(plan).findings
    assert finding.code == "KV902" and RAISED[error] in finding.message and len(finding.message) < 4000
    assert f"Broken._table ({module}.py:" in finding.message


@pytest.mark.schedules
@pytest.mark.parametrize("error", ["MemoryError()", "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"])
def test_what_the_system_raises_in_a_target_is_no_finding(error: str, own: Callable[..., str]) -> None:
    plan = plan_of(own(f"raise {error}", f"lacks_{error.partition('(')[0]}"))
    with pytest.raises(UnknownVerdict, match="the machine is short of"):
        ScheduleRunner(load_own(plan.target)).run(plan)


@pytest.mark.schedules
@pytest.mark.processes
def test_a_target_that_ends_its_process_fails_whoever_runs_it(
    own: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["retract-resume", "hicache", "--shape", "llama-3-micro", "--target", own("os._exit(0)")]
    record = judged(tmp_path / "runs", *cells)
    assert [row.verdict for row in record.scenarios] == [Verdict.FAIL, Verdict.FAIL]
    finding, _ = record.findings
    assert finding.code == "KV902" and "ended with status 0" in finding.message
    capsys.readouterr()
    assert run(["replay", finding.schedule, "--times", "2"]) == 1
    assert "STILL FAILS 2/2" in capsys.readouterr().out
    assert run(["shrink", finding.schedule]) == 1
    assert "KV902" in capsys.readouterr().out


@pytest.mark.schedules
@pytest.mark.processes
def test_a_target_that_raises_gets_its_story_and_a_smaller_schedule(
    own: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = own("raise KeyboardInterrupt")
    (finding, *_) = judged(tmp_path / "runs", "retract-resume", "--shape", "llama-3-micro", "--target", target).findings
    assert finding.story is not None and finding.minimal is not None and "line" in finding.minimal
    assert "broken_target" not in sys.modules
    assert run(["replay", str(finding.minimal["line"]), "--in-process"]) == 1
    assert "broken_target" in sys.modules
    assert run(["shrink", finding.schedule, "--runs", "9"]) == 1
    assert "KV902 KeyboardInterrupt" in capsys.readouterr().out


@pytest.mark.schedules
@pytest.mark.processes
def test_what_a_target_does_to_its_process_does_not_reach_the_run(own: Callable[[str], str], tmp_path: Path) -> None:
    given = ["--shape", "llama-3-micro", "--target", own("disturb()"), *GIVEN]
    assert run(["stress", "retract-resume", *given, "--out", str(tmp_path / "runs")]) == 0
    assert Path.cwd() == tmp_path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise KeyboardInterrupt", "cannot import broken_target (KeyboardInterrupt) at broken_target.py:1"),
        ("import os; os._exit(0)", "it cannot be loaded: the process that judged it ended with status 0"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_clear_line(
    module: str, told: str, own: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = own("")
    (tmp_path / "broken_target.py").write_text(module)
    assert run(["stress", "retract-resume", "--target", target, *GIVEN, "--out", "runs"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and not any((tmp_path / "runs").iterdir())
