"""A target of the user's own: what may be named, that its line runs it again, and what is refused or UNKNOWN."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import kvcheck
from kvcheck.commands.main import run
from kvcheck.commands.options import check_plan
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import file_digest, folder_digest
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.store import write_run
from kvcheck.core.stress.targets.own import ENGINE_HAS, is_own, load_own, own_identity
from kvcheck.core.stress.targets.target import Engine

DOCS = Path(kvcheck.__file__).parents[1] / "docs"
EXAMPLE = DOCS / "examples" / "own-engine"
CELL = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3", "--no-reports"]
NAMES = (f"of_a_test_{number}" for number in itertools.count())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is no longer looked at after the test."""
    monkeypatch.setattr(
        sys, "path", [place for place in sys.path if Path(place).is_absolute() or "__path_hook__" in place]
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def module(folder: Path) -> Callable[[str], str]:
    """Puts a text into a new module of the current folder; its name."""

    def put(text: str) -> str:
        name = next(NAMES)
        (folder / f"{name}.py").write_text(text)
        return name

    return put


def newest(out: Path) -> RunRecord:
    (path,) = out.glob("*/run.json")
    return read_record(path)


def example(module: Callable[[str], str]) -> str:
    return module((EXAMPLE / "my_engine.py").read_text())


@pytest.mark.schedules
@pytest.mark.processes
def test_parts_of_ones_own_are_judged_and_their_line_runs_them_again(
    module: Callable[[str], str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = example(module)
    assert run([*CELL, "--target", f"{name}:by_hand", "--out", "runs"]) == 1
    record = newest(folder / "runs")
    finding = record.findings[0]
    assert finding.code == "KV304" and "full.v" in finding.message
    assert parse_line(finding.schedule).target == f"{name}:by_hand" and f"target={name}:by_hand" in finding.replay
    capsys.readouterr()
    assert run(["replay", finding.schedule]) == 1 and "STILL FAILS 1/1" in capsys.readouterr().out
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert run(["replay", finding.schedule]) == 2
    assert f"cannot import {name} (ModuleNotFoundError: No module named '{name}')" in capsys.readouterr().err


@pytest.mark.schedules
@pytest.mark.processes
def test_a_pass_says_what_was_judged_and_what_was_not_tried(
    module: Callable[[str], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = example(module)
    assert run([*CELL, "--target", f"{name}:whole", "--out", "runs"]) == 0
    record = newest(folder / "runs")
    assert record.identity is not None and record.identity.target is not None
    assert record.identity.target == f"{name}:whole, {file_digest(folder / f'{name}.py')}"
    assert record.scenarios[0].verdict is Verdict.PASS
    told = capsys.readouterr().out
    (line,) = [each for each in record.warnings if each.startswith("not tried: ranks")]
    assert f"of {name}:whole" in line and line.removeprefix("not tried: ") in told and "1 cell in 1 process" in told
    (path,) = (folder / "runs").iterdir()
    assert run(["gate", str(path)]) == 0
    write_run(replace(record, identity=replace(record.identity, target=None)), path)
    assert run(["gate", str(path)]) == 4
    assert f"it does not say which {name}:whole it judged" in capsys.readouterr().out


@pytest.mark.schedules
@pytest.mark.processes
def test_what_a_target_does_not_declare_is_unknown(module: Callable[[str], str], folder: Path) -> None:
    target = f"{example(module)}:retracts_only"
    command = ["stress", "retract-resume", "hicache", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3"]
    assert run([*command, "--no-reports", "--jobs", "1", "--target", target, "--out", "runs"]) == 4
    rows = {row.id: row for row in newest(folder / "runs").scenarios}
    assert rows["retract-resume/llama-3-tiny"].verdict is Verdict.PASS
    hicache = rows["hicache/llama-3-tiny"]
    assert (hicache.verdict, hicache.schedules) == (Verdict.UNKNOWN, 0)
    assert f"target {target} does not declare hicache, which hicache needs; next: " in str(hicache.reason)


@pytest.mark.schedules
@pytest.mark.processes
def test_processes_of_a_run_find_the_module_in_the_current_folder(module: Callable[[str], str], folder: Path) -> None:
    command = ["stress", "retract-resume", "nvlink-aux", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3"]
    target = f"{example(module)}:whole"
    assert run([*command, "--no-reports", "--jobs", "2", "--target", target, "--out", "runs"]) == 0
    assert {row.verdict for row in newest(folder / "runs").scenarios} == {Verdict.PASS}


WRONG = {
    "a module that is not there": ("{}_not:target", "", "cannot import {}_not (ModuleNotFoundError"),
    "a name that is not there": ("{}:target", "", "{} has no target"),
    "an error of the module": ("{}:target", "1 / 0", "cannot import {} (ZeroDivisionError: division by zero)"),
    "a module that ends the process": ("{}:target", "import sys; sys.exit('no')", "cannot import {} (SystemExit: no)"),
    "text that is no Python": ("{}:target", "def", "cannot import {} (SyntaxError"),
    "an error of the function": ("{}:target", "def target(): raise OSError('no disk')", "failed (OSError: no disk)"),
    "a function with arguments": ("{}:target", "def target(shape): ...", "calling it without arguments failed (Type"),
    "a function that gives nothing": ("{}:target", "def target(): ...", "that gives one; got a NoneType"),
    "a class": ("{}:Target", "class Target: ...", "that gives one; got the class Target"),
    "a number": ("{}:target", "target = 7", "that gives one; got a int"),
    "a pool of tensors": ("{}:make", "class Pool: ...\ndef make(): return Pool()", "checked by kvcheck.testing"),
    "an unknown capability": (
        "{}:target",
        "class T:\n    name, capabilities, build = 't', {'teleport'}, lambda self, setup: None\ntarget = T()",
        "unknown capability 'teleport'; known: hicache, loopback, metadata",
    ),
    "no name": ("{}:", "", "unknown target '{}:'; a target of your own is MODULE:NAME; known: builtin"),
    "a path": ("./{}.py:target", "", "a target of your own is MODULE:NAME; known: builtin"),
    "two names": ("{}:target:other", "", "a target of your own is MODULE:NAME"),
}


NO_ENGINE = """
class Target:
    name, capabilities = "mine", {"metadata", "loopback", "retract-resume", "pd-transfer"}

    def build(self, setup):
        return 42

target = Target()
"""


@pytest.mark.schedules
@pytest.mark.processes
def test_a_build_that_gives_no_engine_is_one_clear_line(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = module(NO_ENGINE)
    assert run([*CELL, "--target", f"{own}:target", "--out", "runs"]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("kvcheck: ")]
    assert f"--target {own}:target: expected build to return an engine with submit, abort, standings" in line
    assert "got a int without submit, abort" in line


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names_are_one_clear_line(name: str, module: Callable[[str], str]) -> None:
    target, text, told = WRONG[name]
    own = module(text)
    with pytest.raises(UsageError) as refused:
        check_plan(Plan(scenario="retract-resume", target=target.format(own)))
        load_own(target.format(own))
    (line,) = str(refused.value).splitlines()
    assert told.format(own) in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mutant", "metadata-get-returns-views"], "is put into kvcheck's own target; leave --target out"),
        (["--transport", "tcp"], "its processes run kvcheck's own target; leave --target out"),
    ],
)
def test_options_for_the_builtin_target_are_refused(
    options: list[str], told: str, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "pd-transfer", "--shape", "llama-3-tiny", "--target", f"{example(module)}:whole"]
    assert run([*command, *options, "--out", "runs"]) == 2
    assert told in capsys.readouterr().err


def test_a_file_in_the_current_folder_hides_nothing(module: Callable[[str], str], folder: Path) -> None:
    (folder / "colorsys.py").write_text("raise RuntimeError('this is not the one')")
    name = module("import colorsys\nfrom kvcheck.core.stress.targets.target import FIXED as target")
    assert load_own(f"{name}:target").name == f"{name}:target"
    assert sys.path[-1] == str(folder)


def test_an_engine_of_ones_own_has_to_have_all_that_an_engine_has() -> None:
    methods = [name for name, _ in inspect.getmembers(Engine, callable) if not name.startswith("_")]
    assert sorted(ENGINE_HAS) == methods


def test_the_identity_of_a_package_is_that_of_all_its_files(folder: Path) -> None:
    name = next(NAMES)
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("from kvcheck.core.stress.targets.target import FIXED as target")
    first = own_identity(f"{name}.parts:target")
    assert first == f"{name}.parts:target, {folder_digest(package)}"
    (package / "other.py").write_text("changed = True")
    assert own_identity(f"{name}.parts:target") != first


@pytest.mark.parametrize("text", ["a:b", "a.b_c:d", "größe:x1"])
def test_names_of_the_form_are_own(text: str) -> None:
    assert is_own(text) and Plan(scenario="s", target=text).own_target == text


@pytest.mark.parametrize(
    "text", ["a", "a:", ":b", "a:b.c", "1a:b", "a-b:c", "a:b:c", "a\tb:c", "../a:b", "a.:b", "http://a:b"]
)
def test_other_names_are_not(text: str) -> None:
    assert not is_own(text)


@pytest.mark.schedules
@pytest.mark.processes
def test_the_commands_of_the_page_end_as_it_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    text = (DOCS / "own-engine.md").read_text()
    commands = [line.split() for line in text.splitlines() if line.startswith("kvcheck stress ")]
    codes = [run([*words[1:], "--no-reports", "--jobs", "1", "--out", str(folder / "runs")]) for words in commands]
    assert codes == [1, 0, 4]
