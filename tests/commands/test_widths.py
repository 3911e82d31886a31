"""Screens of all commands at four widths: every line fits, but for those that hold a command or a path to be copied.

Invariants:
- Runs are real: one that passes, one with a mutant, one without enough schedules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

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
