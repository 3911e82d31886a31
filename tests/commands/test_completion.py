"""Shell completion: commands, their options and subcommands, as a shell asks for them."""

from __future__ import annotations

import pytest

from kvcheck.commands import main


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
