"""Help: what is printed without a command, the groups of commands, and how much of a screen a help takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.commands import main as module
from kvcheck.commands.main import run

ROOT = Path(__file__).parents[2]


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
