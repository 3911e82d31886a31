"""`--format json` of every command: stdout is JSON alone, it fits its schema, and the exit code is that of text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fakes.server import Fake
from report.test_baseline import run as made
from rigs.gate import of_this_build
from rigs.known_answers import walk
from rigs.literal_record import FOREIGN, STORY
from rigs.own_engine import OwnEngine
from rigs.schemas import check_fits, validator
from rigs.server_runs import ALPHABET, PARAMETERS

from kvcheck.commands import doctor
from kvcheck.commands.main import COMMANDS, command_named, run
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
    "baseline save": ["baseline", "save", NEW, "OUT/FORMAT.toml", *WHOSE, "--out", "OUT"],
    "baseline accept": ["baseline", "accept", f"{NEW}#1", "OUT/FORMAT.toml", *WHOSE, "--out", "OUT"],
    "baseline prune": ["baseline", "prune", "OUT/known.toml", NEW, "--out", "OUT"],
    "model make": ["model", "make", "OUT/FORMAT", "--layers", "2", "--nodes", "64", "--length", "256"],
    "model answer": ["model", "answer", "OUT/model", "--prompt", "OUT/ids.json"],
    "report": ["report", NEW, "-o", "md=OUT/a.md", "--out", "OUT"],
}
RUN = {
    "stress": ["stress", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "3", *SMALL, "--out", "OUT"],
    "selftest": ["selftest", "offload-skips-index-buffer", "--seed", "1", "--out", "OUT"],
    "bench": ["bench", "metadata-read", "--shape", "glm-5.1", "--rounds", "6", *SMALL, "--out", "OUT"],
    "replay": ["replay", LINE, "--times", "2"],
    "shrink": ["shrink", LINE, "--runs", "40"],
}
SIZES = ("--requests", "8", "--concurrency", "2")
SHORT = ("--prompt", "96", "--answer", "6")
SERVED = {
    "live": ["live", "URL", "prefix-cache", "--known-answers", "MODEL", "--schedules", "1", *SIZES, *SMALL],
    "bench serve": ["bench", "serve", "URL", "--known-answers", "MODEL", "--rounds", "6", *SIZES, *SHORT, *SMALL],
    "model reference": ["model", "reference", "URL", "OUT/FORMAT", "--seed", "1", *SIZES],
}


@pytest.fixture
def out(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a green run, a red one, a baseline that knows it, a model and a prompt."""
    monkeypatch.setattr(doctor, "why_unusable", lambda: None)  # it takes a process
    red = of_this_build(made(FOREIGN, replace(FOREIGN, buffer="latent")))
    rows = (replace(red.findings[0], id=f"{NEW}.1", story=STORY), replace(red.findings[1], id=f"{NEW}.2"))
    RunStore(tmp_path).save(replace(of_this_build(made()), run_id=OLD))
    RunStore(tmp_path).save(replace(red, run_id=NEW, findings=rows))
    assert run(["baseline", "save", NEW, str(tmp_path / "known.toml"), *WHOSE, "--out", str(tmp_path)]) == 0
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "ids.json").write_text(json.dumps(walk(PARAMETERS, count=10)))
    return tmp_path


def fits(command: str, words: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> list[object]:
    """Return the JSON of a command line, once it fits the schema; replay has one for each line."""
    named, again = (
        [each.replace("OUT", str(out)).replace("FORMAT", name) for each in words] for name in ("json", "text")
    )
    capsys.readouterr()
    code = run([*named, "--format", "json"])
    printed = capsys.readouterr().out
    values = [json.loads(line) for line in printed.splitlines()] if command == "replay" else [json.loads(printed)]
    for value in values:
        check_fits(value, "commands", command)
        if isinstance(value, dict):
            assert value.get("exit_code", code) == code
    assert values and run(again) == code
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


@pytest.mark.schedules
def test_json_of_merged_runs_fits_its_schema(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["stress", "retract-resume", "--shape", "llama-3-micro", "--schedules", "3", "--no-reports"]
    for seed in ("1", "2"):
        assert run([*shape, "--seed", seed, "--out", str(out / "runs")]) == 0
    names = [path.name for path in (out / "runs").iterdir()]
    assert fits("merge", ["merge", *names, "--no-reports", "--out", "OUT/runs"], out, capsys)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("name", SERVED)
def test_json_about_a_server_fits_its_schema(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_known = name != "model reference"
    engine = None if is_known else OwnEngine(pool=8192, token_s=0.0002)
    with Fake(ALPHABET if is_known else None, "sglang", model=engine) as server:
        words = [each.replace("URL", server.url).replace("MODEL", "OUT/model") for each in SERVED[name]]
        assert fits(name, [*words, *(["--out", "OUT"] if is_known else [])], out, capsys)


def test_each_command_has_the_option_and_an_entry() -> None:
    leaves: dict[str, Any] = {}
    for name in COMMANDS:
        command = command_named(name)
        below = getattr(command, "commands", None)
        leaves |= {name: command} if below is None else {f"{name} {each}": sub for each, sub in below.items()}
    assert [name for name, each in leaves.items() if "format_name" not in [row.name for row in each.params]] == []
    assert set(leaves) == set(validator("commands").schema["$defs"])


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
