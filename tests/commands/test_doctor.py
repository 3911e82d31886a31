"""doctor tells what is missing and how to get it; list and explain show every table, and name the near match."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvcheck.commands import doctor as module
from kvcheck.commands import main
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import LIBRARIES, UnknownVerdict, UsageError, missing_library
from kvcheck.core.base.registry import Registry
from kvcheck.core.cache.backend import cuda
from kvcheck.core.cache.backend.threads import ThreadDevice

APP = typer.Typer()
APP.command("doctor")(module.doctor)
APP.command("list")(module.list_kind)
APP.command("explain")(module.explain)

ROOT = Path(__file__).parents[2]
STATES = ("ok", "missing", "unknown")


def run(*argv: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(APP, list(argv))
    return result.exit_code, result.output, result.exception


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make one distribution look uninstalled, its variants included."""
    version, distributions = importlib.metadata.version, importlib.metadata.distributions

    def no_version(asked: str) -> str:
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return version(asked)

    monkeypatch.setattr(importlib.metadata, "version", no_version)
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda: (row for row in distributions() if not row.name.startswith(name))
    )


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's engine, where it is installed, can be loaded; asking takes a process."""
    monkeypatch.setattr(module, "why_unusable", lambda: None)


def test_doctor_does_not_call_an_engine_there_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_version", lambda name, variants: "0.3.13.post1")
    monkeypatch.setattr(module, "why_unusable", lambda: "libibverbs.so.1: cannot open shared object file")
    code, output, _ = run("doctor", "--out", str(tmp_path))
    assert code == 0
    assert re.search(r"missing +mooncake-transfer-engine +0\.3\.13.*: libibverbs", output)
    assert re.search(r"\n mooncake-transfer-engine +apt-get install -y lib", output)


def test_doctor_has_a_line_for_each_component_and_exits_0(tmp_path: Path) -> None:
    code, output, error = run("doctor", "--out", str(tmp_path))
    assert code == 0, error
    lines = output.splitlines()
    others = ("python", "torch threads", "CUDA device", "CPU noise", "temporary folders", "reports folder")
    names = [*module.REQUIRED, *module.OPTIONAL, *others]
    for name in names:
        states = [found[1] for line in lines if (found := re.match(rf" (\w+) +{re.escape(name)}  ", line))]
        assert len(states) == 1 and states[0] in STATES, name
    assert lines[0].split() == ["state", "part", "found"] and lines[-1] == " next   kvcheck stress"
    assert list(tmp_path.iterdir()) == []


def test_doctor_ends_in_4_without_a_required_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pandas")
    _, output, error = run("doctor", "--out", str(tmp_path))
    assert isinstance(error, UnknownVerdict) and error.exit_code == 4
    assert "missing pandas" in str(error) and "pip install pandas" in str(error)
    assert re.search(r"missing +pandas +for CSV reports", output) and re.search(
        r"\n pandas +pip install pandas", output
    )


@pytest.mark.parametrize("name", module.OPTIONAL)
def test_doctor_does_not_mind_an_optional_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, name)
    code, output, _ = run("doctor", "--out", str(tmp_path))
    assert code == 0
    assert re.search(rf"missing +{name} +for ", output)
    assert re.search(rf"\n {name} +{re.escape(module.OPTIONAL[name][0])}", output)


def test_doctor_ends_in_4_where_reports_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _, output, error = run("doctor", "--out", str(tmp_path / "file"))
    assert isinstance(error, UnknownVerdict)
    assert "missing reports folder" in str(error) and "--out DIR" in output


def test_doctor_names_the_cuda_device_and_tries_its_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: ThreadDevice())
    _, output, _ = run("doctor", "--out", str(tmp_path))
    assert re.search(r"ok +CUDA device +2 x NVIDIA H200", output)
    assert re.search(r"ok +held lanes +a hold is let go in \d+ us and ends by itself after \d+ ms", output)


def test_doctor_says_why_holds_could_not_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(index: int) -> ThreadDevice:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(cuda, "CudaDevice", lost)
    _, output, _ = run("doctor", "--out", str(tmp_path))
    assert re.search(r"unknown +held lanes +the device failed: CUDA error: unspecified launch failure\s", output)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("some avg10=0.50 avg60=1.00 avg300=1.00 total=7\n", r"ok +CPU noise +work waited 0\.5% of the last 10 s"),
        ("some avg10=95.00 avg60=1.00 avg300=1.00 total=7\n", r"ok +CPU noise .*busy, times will scatter"),
        ("nonsense", r"unknown +CPU noise"),
        (None, r"CPU noise +boot with psi=1"),
    ],
)
def test_doctor_reads_cpu_pressure(
    text: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRESSURE_FILE", tmp_path / "cpu")
    if text is not None:
        (tmp_path / "cpu").write_text(text)
    code, output, _ = run("doctor", "--out", str(tmp_path))
    assert code == 0 and re.search(line, output)


@pytest.mark.parametrize("kind", module.KINDS)
def test_list_shows_every_kind_with_a_line_about_each_row(kind: str) -> None:
    code, output, error = run("list", kind, "--format", "json")
    assert code == 0, error
    rows = json.loads(output)
    assert rows
    assert all(row["name"] and row["about"] for row in rows), rows
    plain = run("list", kind)[1]
    assert all(f"{row['name']} " in plain for row in rows)


@pytest.mark.parametrize("argv", [["stress", "--mutant", "nosuch"], ["selftest", "nosuch"]])
def test_a_long_list_is_named_instead_of_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(argv) == 2
    listed = len(module.things("mutants"))
    assert f"expected one of {listed} names; see kvcheck list mutants" in capsys.readouterr().err


def test_list_shows_a_row_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    table: Registry[object] = Registry("transport", {"far": "kvcheck_no_such_module:Far"})
    monkeypatch.setattr("kvcheck.core.cache.transfer.TRANSPORTS", table)
    assert re.search(r" far +It is not usable here: No module named 'kvcheck_no", run("list", "transports")[1])


@pytest.mark.parametrize("kind", module.KINDS)
def test_explain_every_name_of_every_list(kind: str) -> None:
    """A name that two lists have is explained by the first of them."""
    for name in module.things(kind):
        card = json.loads(run("explain", name, "--format", "json")[1])
        assert name in card.values() and len(card) > 1 and all(card.values()), name


def test_explain_takes_letters_and_codes_in_any_case() -> None:
    assert CODES["KV304"].meaning in run("explain", "kv304")[1]
    assert re.match(r" bug +a: what a retracted request gets back", run("explain", "a")[1])


@pytest.mark.parametrize("command", ["list", "explain"])
def test_without_a_name_the_kinds_are_a_table(command: str) -> None:
    code, output, error = run(command)
    rows = [line.split() for line in output.splitlines()]
    for kind in module.KINDS:
        names = module.things(kind)
        assert [row[1:3] for row in rows if row[:1] == [kind]] == [[str(len(names)), next(iter(names))]]
    assert isinstance(error, UsageError) if command == "explain" else code == 0


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("line", ["doctor --out OUT", "list", "list mutants", "list codes", "explain KV103"])
def test_no_line_is_longer_than_the_terminal(
    line: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    output = run(*line.replace("OUT", str(tmp_path)).split())[1]
    assert all(len(each) <= width or str(tmp_path) in each for each in output.splitlines())


@pytest.mark.processes
def test_an_explanation_is_there_where_docstrings_are_removed() -> None:
    command = [sys.executable, "-OO", "-m", "kvcheck", "explain", "ordering"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == run("explain", "ordering")[1] and len(ended.stdout) > 100


@pytest.mark.processes
@pytest.mark.parametrize(
    ("absent", "command", "code"),
    [
        ("torch numpy", "--help", 0),
        ("torch numpy", "explain KV304", 0),
        ("torch numpy", "list codes", 0),
        ("torch numpy", "stress", 4),
        ("torch numpy", "doctor", 4),
        ("typer torch", "explain KV304", 4),
    ],
)
def test_a_library_that_is_not_installed_is_one_line_with_the_command_that_adds_it(
    absent: str, command: str, code: int, tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent.split()})); from kvcheck.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (code, int(code > 0)), done.stderr
    assert ("; next: pip install torch --index-url" in done.stderr) == (code > 0)


def test_a_missing_library_is_one_that_pyproject_names() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(LIBRARIES) == sorted(re.split(r"[<>=]", row)[0] for row in needed)
    assert missing_library(ModuleNotFoundError(name="module_of_a_user")) is None
