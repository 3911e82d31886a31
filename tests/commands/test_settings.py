"""Settings: which place wins, what a record says of it, and what is refused with its place.

Invariants:
- Commands run on stand-ins or are refused before any work; nothing here runs a schedule but what is marked so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcheck.commands import main
from kvcheck.commands.main import command_named, configurable, run
from kvcheck.commands.settings import FALSE, PERSONAL, TRUE, Option, Setting, options_of, words_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import read_record

PROJECT = """
[tool.other]
stress = 1
[tool.kvcheck.stress]
schedules = 3
shape = ["llama-3-tiny", "gpt-oss-tiny"]
max-time = 7.5
reports = false
[tool.kvcheck.list]
json = true
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in a project whose settings are PROJECT."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    return inside


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What `kvcheck config show` prints, one line a setting, without runs of spaces."""
    assert run([*words, "config", "show"]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_nearest_place_wins_and_the_others_are_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here.parent / "pyproject.toml"
    monkeypatch.setenv("KVCHECK_STRESS_SCHEDULES", "4")
    monkeypatch.setenv("KVCHECK_STRESS_SHAPE", "llama-3-fp8-tiny, glm-5.1-tiny")
    monkeypatch.setenv("KVCHECK_LIST_JSON", "no")
    monkeypatch.setenv("KVCHECK_ENGINE_ENV_BASE", "envs/base")
    monkeypatch.setenv("KVCHECK_SGLANG", "a variable of the tests, which names no command")
    assert shown(capsys) == [
        f"stress --max-time=7.5 {file}: [tool.kvcheck.stress] max-time",
        f"stress --no-reports {file}: [tool.kvcheck.stress] reports",
        "stress --schedules=4 KVCHECK_STRESS_SCHEDULES",
        f"instead of 3 {file}: [tool.kvcheck.stress] schedules",
        "stress --shape=llama-3-fp8-tiny --shape=glm-5.1-tiny KVCHECK_STRESS_SHAPE",
        f"instead of ['llama-3-tiny', 'gpt-oss-tiny'] {file}: [tool.kvcheck.stress] shape",
        "engine-env --base=envs/base KVCHECK_ENGINE_ENV_BASE",
        "list (off, as by default) KVCHECK_LIST_JSON",
        f"instead of True {file}: [tool.kvcheck.list] json",
    ]


def test_a_file_that_is_named_stands_for_the_project(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "other.toml").write_text("[gate]\nmin_schedules = 9")
    told = ["gate --min-schedules=9 other.toml: [gate] min_schedules"]
    assert shown(capsys, "--config", "other.toml") == told
    monkeypatch.setenv("KVCHECK_CONFIG", "other.toml")
    assert shown(capsys) == told
    none = ["no settings: no KVCHECK_ variable of a command, and no [tool.kvcheck] around this folder"]
    assert shown(capsys, "--config", "") == none
    monkeypatch.setenv("KVCHECK_CONFIG", "")
    assert shown(capsys) == none


@pytest.mark.schedules
def test_a_record_and_its_repetition_name_what_was_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here.parent / "pyproject.toml").write_text('[tool.kvcheck.stress]\nschedules = 24\nreports = false\nout = "runs"')
    command = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3"]
    assert run([*command]) == 0
    (path,) = here.glob("runs/*/run.json")
    record = read_record(path)
    assert record.argv == ("stress", "--no-reports", "--out=runs", *command[1:])
    assert record.repro == " ".join(("kvcheck", *record.argv))
    assert record.scenarios[0].schedules == 3, "what was typed counts"
    assert not (path.parent / "report.html").exists()
    assert "error" not in capsys.readouterr().err


def test_a_list_that_was_typed_is_not_added_to(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here.parent / "pyproject.toml").write_text('[tool.kvcheck.stress]\nshape = ["no-such-shape"]')
    assert run(["stress", "--shape", "neither-this"]) == 2
    assert "neither-this" in capsys.readouterr().err
    assert run(["stress"]) == 2
    assert "no-such-shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool]\nkvcheck = 3", "[tool] kvcheck: expected a table, [tool.kvcheck], got 3"),
        ("[tool.kvcheck.stress]\nschedulez = 3", "--schedulez; did you mean 'schedules'?"),
        ("[tool.kvcheck.stres]\nseed = 3", "[tool.kvcheck.stres]: kvcheck has no such command; did you mean 'stress'?"),
        ("[tool.kvcheck]\nstress = 3", "tool.kvcheck.stress: expected a table, [tool.kvcheck.stress], got 3"),
        ("[tool.kvcheck.stress]\nseed = true", "expected a text or a number for --seed, got True"),
        ("[tool.kvcheck.stress]\nseed = [1]", "expected one value for --seed, got [1]"),
        ("[tool.kvcheck.stress]\nresume = 3", "expected true or false for --resume, got 3"),
        ("[tool.kvcheck.stress]\nshape = [{}]", "expected a text or a number for --shape, got {}"),
        (
            "[tool.kvcheck.stress]\nseed = 'x'",
            "; it is set by {}: [tool.kvcheck.stress] seed; see kvcheck stress --help",
        ),
        ("[tool.kvcheck.stress\n", "cannot read settings from {}: "),
        ("[tool.kvcheck.model]\nout = 'x'", "[tool.kvcheck.model]: kvcheck has no such command"),
        *(
            (f"[tool.kvcheck.stress]\n{name} = 'x'", f"{name}: no file may set it; say --{name} on the command line")
            for name in sorted(PERSONAL)
        ),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_place(
    text: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here.parent / "pyproject.toml"
    path.write_text(text)
    assert run(["stress"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("kvcheck: ")
        and str(path) in line
        and told.replace("{}", str(path), 1) in line.replace("{}", str(path), 1)
    )


def test_wrong_variables_and_files_that_are_not_there(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--config", "nowhere.toml", "stress"]) == 2
    assert "--config: expected a TOML file, found none at nowhere.toml" in capsys.readouterr().err
    monkeypatch.setenv("KVCHECK_CONFIG", "nowhere.toml")
    assert run(["stress"]) == 2
    assert "KVCHECK_CONFIG: expected a TOML file, found none at nowhere.toml" in capsys.readouterr().err
    monkeypatch.setenv("KVCHECK_CONFIG", "")
    monkeypatch.setenv("KVCHECK_STRESS_SHAPES", "a")
    assert run(["stress"]) == 2
    assert (
        "KVCHECK_STRESS_SHAPES: kvcheck stress has no option --shapes; did you mean 'shape'?" in capsys.readouterr().err
    )
    assert run(["config", "show", "stres"]) == 2
    assert "expected one of stress, replay, " in capsys.readouterr().err


def test_help_is_printed_whatever_is_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here.parent / "pyproject.toml").write_text("[tool.kvcheck.stress]\nschedules = 3")
    assert run(["stress", "--help"]) == 0
    assert "--max-time" in capsys.readouterr().out
    assert run(["stress", "--no-such-option"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_the_schema_has_every_option_that_may_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    tables = json.loads(capsys.readouterr().out)["properties"]
    assert list(tables) == list(configurable()) and set(main.COMMANDS) - set(tables) == main.WITH_SUBCOMMANDS
    stress = tables["stress"]["properties"]
    assert stress["schedules"] == {"type": "integer"} and stress["max-time"] == {"type": "number"}
    assert stress["shape"] == {"type": "array", "items": {"type": "string"}}
    assert stress["reports"] == {"type": "boolean"} and stress["target"] == {"type": "string"}
    assert not PERSONAL & set(stress)
    assert set(options_of(command_named("stress").params)) >= PERSONAL, "they are options"


FLAG = Option(name="reports", key="reports", on="--reports", off="--no-reports", takes="flag", kind="")


@pytest.mark.parametrize("text", [*TRUE, *FALSE, "TRUE", "Off"])
def test_a_flag_is_on_or_off(text: str) -> None:
    setting = Setting(command="stress", option="reports", value=text, place="here", rank=2)
    assert words_of(setting, FLAG) == ["--reports" if text.lower() in TRUE else "--no-reports"]


@pytest.mark.parametrize("value", ["", "maybe", 2, 1.0, None])
def test_a_flag_is_nothing_else(value: object) -> None:
    with pytest.raises(UsageError, match="here: expected true or false for --reports"):
        words_of(Setting(command="stress", option="reports", value=value, place="here", rank=2), FLAG)


def test_a_value_with_a_dash_in_front_is_a_value() -> None:
    option = Option(name="seed", key="seed", on="--seed", off=None, takes="value", kind="int")
    assert words_of(Setting(command="stress", option="seed", value=-3, place="", rank=1), option) == ["--seed=-3"]
