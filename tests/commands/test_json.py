"""`--format json` of every command: stdout is JSON alone, it fits its schema, and the exit code is that of text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from report.test_baseline import run as made
from rigs.gate import of_this_build
from rigs.literal_record import FOREIGN, STORY
from rigs.schemas import check_fits, validator

from kvcheck.commands import doctor
from kvcheck.commands.main import run
from kvcheck.core.run.store import RunStore

OLD, NEW = "20260101-000000-aaaaaaaa", "20260102-000000-bbbbbbbb"
LINE = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0"
WHOSE = ("--owner", "me", "--reason", "issue 7", "--expires", "2999-01-01")
SMALL = ("--seed", "1", "--no-reports")
STORED = {
    "list": ["list"],
    "list mutants": ["list", "mutants"],
    "list shapes": ["list", "shapes"],
    "list evidence": ["list", "evidence"],
    "explain": ["explain", "KV304"],
    "explain mutant": ["explain", "offload-skips-index-buffer"],
    "doctor": ["doctor", "--out", "OUT"],
    "show": ["show", f"{NEW}#1", "--out", "OUT"],
    "show without a story": ["show", f"{NEW}#2", "--out", "OUT"],
    "compare": ["compare", OLD, NEW, "--out", "OUT"],
    "gate": ["gate", NEW, "--out", "OUT"],
    "baseline show": ["baseline", "show", "OUT/known.toml"],
    "report": ["report", NEW, "-o", "md=OUT/a.md", "--out", "OUT"],
}
RUN = {
    "stress": ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", *SMALL, "--out", "OUT"],
    "selftest": ["selftest", "offload-skips-index-buffer", "--seed", "1", "--out", "OUT"],
    "bench": ["bench", "metadata-read", "--shape", "glm-5.1", "--rounds", "6", *SMALL, "--out", "OUT"],
    "replay": ["replay", LINE, "--times", "2"],
    "shrink": ["shrink", LINE, "--runs", "40"],
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a green run, a red one, and a baseline that knows it."""
    monkeypatch.setattr(doctor, "why_unusable", lambda: None)  # it takes a process
    red = of_this_build(made(FOREIGN, replace(FOREIGN, buffer="latent")))
    rows = (replace(red.findings[0], id=f"{NEW}.1", story=STORY), replace(red.findings[1], id=f"{NEW}.2"))
    RunStore(tmp_path).save(replace(of_this_build(made()), run_id=OLD))
    RunStore(tmp_path).save(replace(red, run_id=NEW, findings=rows))
    assert run(["baseline", "save", NEW, str(tmp_path / "known.toml"), *WHOSE, "--out", str(tmp_path)]) == 0
    return tmp_path


def fits(command: str, words: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> list[object]:
    """Return the JSON of a command line, once it fits the schema; replay has one for each line."""
    named = [word.replace("OUT", str(out)) for word in words]
    capsys.readouterr()
    code = run([*named, "--format", "json"])
    printed = capsys.readouterr().out
    values = [json.loads(line) for line in printed.splitlines()] if command == "replay" else [json.loads(printed)]
    for value in values:
        check_fits(value, "commands", command)
        if isinstance(value, dict):
            assert value.get("exit_code", code) == code
    assert values and run(named) == code
    return values


def command_of(name: str) -> str:
    known = validator("commands").schema["$defs"]
    return max((each for each in known if name.startswith(each)), key=len)


@pytest.mark.parametrize("name", STORED)
def test_json_of_a_command_fits_its_schema(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fits(command_of(name), STORED[name], out, capsys)


@pytest.mark.schedules
@pytest.mark.parametrize("name", RUN)
def test_json_of_a_command_that_runs_schedules_fits_its_schema(
    name: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fits(name, RUN[name], out, capsys)


@pytest.mark.parametrize("command", ["compare", "show", "doctor", "stress", "gate", "report"])
def test_the_schema_refuses_another_command(command: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = fits("list", STORED["list"], out, capsys)
    with pytest.raises(jsonschema.ValidationError):
        check_fits(listed, "commands", command)


def test_the_story_has_its_finding(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = fits("show", STORED["show"], out, capsys)
    (bare,) = fits("show", STORED["show without a story"], out, capsys)
    assert isinstance(told, dict) and isinstance(bare, dict)
    assert (told["finding"], told["code"], told["untold"], len(told["steps"])) == (f"{NEW}.1", "KV102", None, 5)
    assert bare["finding"] == f"{NEW}.2" and bare["untold"] and not bare["steps"]
