"""Help, completion and the widths of terminals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

from kvcheck.commands import main
from kvcheck.commands import main as module
from kvcheck.commands.main import run

WIDTHS = (80, 100, 120, 160)
SMALL = "stress retract-resume --shape glm-5.1-micro --seed 1 --no-reports"
RUNS = {
    "green": f"{SMALL} --schedules 3",
    "red": f"{SMALL} --schedules 3 --mutant offload-skips-index-buffer",
    "unknown": f"{SMALL} --schedules 1",
    "other": f"{SMALL.replace('--seed 1', '--seed 2')} --schedules 3",
}
COMMANDS = {
    **{name: (command, code) for (name, command), code in zip([*RUNS.items()][:3], (0, 1, 4), strict=True)},
    "show": ("show red 1 --out red", 0),
    "replay": ("replay red/run.json#1", 1),
    "shrink": ("shrink red/run.json#1", 1),
    "explain a code": ("explain KV304", 0),
    "explain a mutant": ("explain offload-skips-index-buffer", 0),
    "list": ("list", 0),
    "list mutants": ("list mutants", 0),
    "list oracles": ("list oracles", 0),
    "list situations": ("list situations", 0),
    "doctor": ("doctor", 0),
    "compare": ("compare green red", 1),
    "gate a pass": ("gate green", 0),
    "gate a failure": ("gate red", 1),
    "gate an unknown": ("gate unknown", 4),
    "merge": ("merge green other --out merged", 0),
    "selftest": ("selftest offload-skips-index-buffer --out tested", 0),
    "bench": ("bench metadata-read --shape glm-5.1-micro --max-time 1 --out priced", None),
    "baseline show": ("baseline show known.toml", 0),
    "no command": ("", 2),
    **{f"help of {name}": (f"{name} --help", 0) for name in ("stress", "probe", "live", "env", "replay", "model make")},
}
COPIED = re.compile(r"kvcheck [a-z]|pytest --|[\w.-]*/[\w./-]+|https?://|[a-z-]+:shape=|\S{60,}")
"""Of a line that holds a command, a path, an address or a schedule line."""
STYLE = re.compile(r"\x1b\[[\d;]*[mJA]|\r")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("widths"), Path.cwd()
    os.chdir(folder)
    try:
        for name, command in RUNS.items():
            run([*command.split(), "--out", f"of-{name}"])
            next((folder / f"of-{name}").iterdir()).rename(folder / name)
        last = f"{date.today() + timedelta(days=30)}"
        rows = ["--owner", "me", "--reason", "known", "--expires", last]
        assert run(["baseline", "save", "red", "known.toml", *rows]) == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.schedules
@pytest.mark.processes  # doctor
@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command, code = COMMANDS[name]
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        got = run(command.split())
        printed = capsys.readouterr()
        lines = STYLE.sub("", printed.out + printed.err).splitlines()
        assert code is None or got == code, lines
        assert lines
        wide = [line for line in lines if len(line) > width and not COPIED.search(line)]
        assert not wide, wide


def test_without_a_command_help_is_printed_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in module.COMMANDS)


@pytest.mark.parametrize(
    ("short", "whole"),
    [(["-V"], ["--version"]), (["help"], ["--help"]), (["help", "stress"], ["stress", "--help"])],
    ids=" ".join,
)
def test_words_that_users_try_work_as_the_options(
    short: list[str], whole: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(whole) == 0
    expected = capsys.readouterr().out
    assert expected and run(short) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("command", module.COMMANDS)
def test_help_of_each_command_exits_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Example" in printed and not any(f"<{name}" in printed for name in ("str>", "list[", "int>", "path>"))


def test_commands_are_listed_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"{heading}:\n") for heading in module.GROUPS]
    assert places == sorted(places) and places[0] < printed.index("  stress ") < places[1]


def test_the_help_of_stress_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["stress", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120  # examples are not broken
    shown = [line for line in lines if line.startswith("  -")]
    hidden = [each.opts[0] for each in module.command_named("stress").params if getattr(each, "hidden", False)]
    assert len(shown) <= 24
    manuals = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert hidden and all(f"`{each}`" in manuals for each in hidden)


def completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash offers for the last word."""
    monkeypatch.setenv("_KVCHECK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    assert main.run([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvcheck st", ["stress"]),
        ("kvcheck ", [name for name in main.COMMANDS if name != main.SERVE]),
        ("kvcheck stress --sha", ["--shape", "--shard"]),
        ("kvcheck stress --max-time 3 --min-s", ["--min-schedules"]),
        ("kvcheck env --so", ["--source"]),
        ("kvcheck bench serve --ver", ["--versus"]),
        ("kvcheck model ma", ["make"]),
        ("kvcheck nosuch --sh", ["--show-completion"]),
    ],
)
def test_a_word_is_completed(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(words, monkeypatch, capsys) == offered


def test_the_script_for_a_shell_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "--install-completion" in printed and "--show-completion" in printed
