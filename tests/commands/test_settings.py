"""Settings: which place wins, what a record has of it, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.commands.main import COMMANDS, run
from kvcheck.commands.settings import ALL_TYPED, PERSONAL
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
format = "json"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in a project whose settings are PROJECT."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    return inside


def is_json(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Whether `kvcheck list codes` prints JSON."""
    assert run([*words]) == 0
    return capsys.readouterr().out.startswith("[")


def test_the_nearest_place_wins(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("list", "codes")
    assert is_json(capsys, *command)
    (here / "other.toml").write_text("[list]\nformat = 'text'")
    assert not is_json(capsys, "--config", "other.toml", *command)
    monkeypatch.setenv("KVCHECK_CONFIG", "other.toml")
    assert not is_json(capsys, *command)
    monkeypatch.setenv("KVCHECK_LIST_FORMAT", "json")
    assert is_json(capsys, *command)
    monkeypatch.delenv("KVCHECK_LIST_FORMAT")
    assert is_json(capsys, *command, "--format", "json")
    monkeypatch.setenv("KVCHECK_CONFIG", "")
    assert not is_json(capsys, *command), "no file is read"
    monkeypatch.delenv("KVCHECK_CONFIG")
    assert not is_json(capsys, "--config", "", *command)


def test_a_command_of_two_words_has_a_table_and_variables_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("bench", "serve", "http://127.0.0.1:1", "--known-answers", "tiny")
    (here.parent / "pyproject.toml").write_text("[tool.kvcheck.bench-serve]\nprecision = 'much'")
    assert run([*command]) == 2
    assert "got 'much'; it is set by " in capsys.readouterr().err
    monkeypatch.setenv("KVCHECK_BENCH_SERVE_PRECISION", "more")
    assert run([*command]) == 2
    assert "got 'more'; it is set by KVCHECK_BENCH_SERVE_PRECISION" in capsys.readouterr().err
    assert run(["bench", "nosuch"]) == 2
    assert "unknown case 'nosuch'" in capsys.readouterr().err


@pytest.mark.schedules
def test_a_record_and_its_repetition_name_what_was_set(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here.parent / "pyproject.toml").write_text('[tool.kvcheck.stress]\nschedules = 24\nreports = false\nout = "runs"')
    monkeypatch.setenv("KVCHECK_STRESS_SHAPE", "llama-3-tiny")
    command = ["stress", "retract-resume", "--seed", "1", "--schedules", "3"]
    assert run([*command]) == 0
    (path,) = here.glob("runs/*/run.json")
    record = read_record(path)
    assert record.argv == ("stress", "--shape=llama-3-tiny", "--out=runs", "--no-reports", *command[1:])
    assert record.repro == " ".join(("kvcheck", *record.argv))
    assert record.scenarios[0].schedules == 3, "what was typed counts"
    assert not (path.parent / "report.html").exists()
    assert "error" not in capsys.readouterr().err


def test_a_list_that_was_typed_is_not_added_to(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here.parent / "pyproject.toml").write_text('[tool.kvcheck.stress]\nshape = "no-such-shape"')
    assert run(["stress", "--shape", "neither-this"]) == 2
    assert "neither-this" in capsys.readouterr().err
    assert run(["stress"]) == 2
    assert "no-such-shape" in capsys.readouterr().err
    monkeypatch.setenv("KVCHECK_STRESS_SHAPE", "llama-3-tiny nor-this")
    assert run(["stress"]) == 2
    assert "unknown shape 'nor-this'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool]\nkvcheck = 3", "[tool] kvcheck: expected a table, [tool.kvcheck], got 3"),
        ("[tool.kvcheck.stress]\nschedulez = 3", "--schedulez; did you mean 'schedules'?"),
        ("[tool.kvcheck.stres]\nseed = 3", "[tool.kvcheck.stres]: no command 'stres'; did you mean 'stress'?"),
        ("[tool.kvcheck.campaign]\nshard = '1/2'", "many seeds are run by kvcheck stress --seeds A-B"),
        (
            "[tool.kvcheck.model]\nlayers = 3",
            "[tool.kvcheck.model]: options of kvcheck model are only typed; leave it out",
        ),
        ("[tool.kvcheck]\nstress = 3", "tool.kvcheck.stress: expected a table, [tool.kvcheck.stress], got 3"),
        ("[tool.kvcheck.stress]\nseed = [1]", "expected one value for --seed, got [1]"),
        ("[tool.kvcheck.stress]\nshape = [{}]", "expected a text or a number for --shape, got {}"),
        *(
            (f"[tool.kvcheck.stress]\n{name} = {value}", f"; it is set by {{}}: [tool.kvcheck.stress] {name}; see ")
            for name, value in (("seed", "'x'"), ("seed", "true"), ("seed", "1.5"), ("resume", "3"))
        ),
        ("[tool.kvcheck.stress\n", "cannot read settings from {}: "),
        ("[tool.kvcheck.live]\nscenarios = 'x'", "kvcheck live has no option --scenarios"),
        *(
            (f"[tool.kvcheck.live]\n{name} = 'x'", f"{name}: no file may set it; type --{name} on the command line")
            for name in sorted(PERSONAL)
        ),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_place(
    text: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here.parent / "pyproject.toml"
    path.write_text(text)
    assert run(["live", "http://127.0.0.1:1"] if "live" in text else ["stress"]) == 2
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
    monkeypatch.setenv("KVCHECK_STRESS_SEED", "x")
    assert run(["stress"]) == 2
    told = "--seed: expected a valid integer, got 'x'; it is set by KVCHECK_STRESS_SEED; see kvcheck stress --help"
    assert told in capsys.readouterr().err
    monkeypatch.setenv("KVCHECK_STRESS_SHAPES", "a")
    assert run(["stress"]) == 2
    told = "KVCHECK_STRESS_SHAPES: kvcheck stress has no option --shapes; did you mean 'shape'?"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "model", "baseline"])
@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("KVCHECK_SEED", "no command 'seed'"),
        ("KVCHECK_STRES_SEED", "no command 'stres'; did you mean 'stress'?"),
        ("KVCHECK_CAMPAIGN_SHARD", "no command 'campaign'; many seeds are run by kvcheck stress --seeds A-B"),
        ("KVCHECK_MODEL_LAYERS", "options of kvcheck model are only typed; leave it out"),
    ],
)
def test_a_variable_of_no_command_is_one_line(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    variable: str,
    told: str,
) -> None:
    monkeypatch.setenv(variable, "3")
    assert run([command]) == 2
    assert capsys.readouterr().err == f"kvcheck: {variable}: {told}\n"


def test_a_table_of_a_command_that_reads_none_is_one_line_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here.parent / "pyproject.toml").write_text("[tool.kvcheck.baseline]\nowner = 'kv'")
    assert run(["baseline", "show", "known.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("[tool.kvcheck.baseline]: options of kvcheck baseline are only typed; leave it out")
    assert {name for name, (target, _) in COMMANDS.items() if target.endswith(":app")} == ALL_TYPED


def test_help_is_printed_whatever_is_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here.parent / "pyproject.toml").write_text("[tool.kvcheck.stress]\nschedules = 3")
    assert run(["stress", "--help"]) == 0
    assert "--max-time" in capsys.readouterr().out
    assert run(["stress", "--no-such-option"]) == 2
    assert "No such option" in capsys.readouterr().err
