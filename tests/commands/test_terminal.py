"""What a terminal gets that a pipe does not: colours, and a line that overwrites itself; and what a log gets instead.

Invariants:
- Streams are stand-ins; no schedule runs here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcheck.commands import terminal as lines
from kvcheck.commands.terminal import Terminal, complain, has_colours, passing, say, warn
from kvcheck.core.base.record import Evidence
from kvcheck.core.run import session as module
from kvcheck.core.run.cell import ScheduleCell
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.session import Session


class Screen(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def getvalue(self) -> str:
        """All that was written."""
        return self.bytes.getvalue().decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What `written` writes to, which takes colours."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    return Screen()


def written(terminal: Screen, *acts: Callable[[], None]) -> str:
    """What these write while the terminal stands for stdout and stderr."""
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        for act in acts:
            act()
    return terminal.getvalue()


@pytest.mark.parametrize(
    ("line", "coloured"),
    [
        (" PASS  a cell", "\x1b[1;32m PASS\x1b[0m  a cell"),
        (" FAIL  a cell", "\x1b[1;31m FAIL\x1b[0m  a cell"),
        (" ????  a cell", "\x1b[1;33m ????\x1b[0m  a cell"),
        (" STILL FAILS 1/1  a cell", "\x1b[1;31m STILL FAILS\x1b[0m 1/1  a cell"),
        (" hicache  ✔7 ✘1 ?2", " hicache  \x1b[32m✔\x1b[0m7 \x1b[1;31m✘\x1b[0m1 \x1b[1;33m?\x1b[0m2"),
        ("    again  kvcheck replay R#1", "    again  \x1b[36mkvcheck replay R#1\x1b[0m"),
        (" KV102 foreign", " \x1b[35mKV102\x1b[0m foreign"),
        (" report runs/R/report.html", " report \x1b[4mruns/R/report.html\x1b[0m"),
        *((line, line) for line in ("PASS", " PASSES", "  PASS", " it is a PASS", " exit 0", "", " who is it? it")),
    ],
)
def test_a_terminal_gets_colours(line: str, coloured: str, terminal: Screen) -> None:
    assert written(terminal, lambda: say(line)) == f"{coloured}\n"


def test_text_of_a_record_brings_no_colours(terminal: Screen) -> None:
    assert "\\x1b[31mred" in written(terminal, lambda: say(" PASS  \x1b[31mred"))


@pytest.mark.parametrize(
    ("variables", "is_terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_who_gets_colours(
    variables: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_colours(Screen() if is_terminal else io.StringIO()) is expected


def test_a_line_that_passes_is_overwritten_and_an_error_begins_a_line_of_its_own(terminal: Screen) -> None:
    told = written(terminal, lambda: passing("loading \x1b"), lambda: complain("no such thing"))
    assert told == "\r\x1b[Jloading \\x1b\r\x1b[J" + "kvcheck: no such thing\n"


def test_lines_that_pass_replace_those_before_and_the_last_one_is_left_where_the_screen_is_too_low(
    terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "terminal_size", lambda stream: (80, 3))
    shown = Terminal(is_quiet=False)
    shown.board = lambda width: ["a", "b"][: 1 + (width == 80 and len(told) > 0)]
    told: list[str] = []
    acts = (lambda: shown.progress("1", 0.5), lambda: told.append(""), lambda: shown.progress("2", None), shown.clear)
    assert re.sub(r"\d+:\d\d", "T", written(terminal, *acts)) == (
        "\r\x1b[Ja\n ━━━━━━───────  T of about T  1\r\x1b[1A\x1b[J T  2\r\x1b[J"
    )


@pytest.mark.parametrize(("columns", "shown"), [(40, 39), (0, 79), (200, 150)])
def test_a_line_that_passes_fits_the_terminal(
    columns: int, shown: int, terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "fileno", lambda: 2)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((columns, 24)))
    assert written(terminal, lambda: passing("x" * 150)) == "\r\x1b[J" + "x" * shown


def test_a_dumb_terminal_gets_lines_alone(tmp_path: Path, terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    session = made(tmp_path)
    told = written(
        terminal, lambda: session.progress("begun"), lambda: session.say(" PASS  a cell"), lambda: warn("no")
    )
    assert told == " PASS  a cell\nkvcheck: warning: no\n"


def test_the_clock_goes_on_while_nothing_is_reported(
    tmp_path: Path, terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    session, painted = made(tmp_path), threading.Semaphore(0)
    monkeypatch.setattr(lines._LIVE, "show", lambda shown: painted.release())
    session.progress("begun")
    with session.ticking():
        assert all(painted.acquire(timeout=60) for _ in range(4)), "once when it was reported, and by the clock alone"
    assert "kvcheck clock" not in [thread.name for thread in threading.enumerate()]


def test_nothing_passes_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    passing("loading")
    complain("no such thing")
    assert capsys.readouterr().err == "kvcheck: no such thing\n"


def made(tmp_path: Path, *, quiet: bool = False, plan: dict[str, object] | None = None) -> Session:
    return Session(
        argv=["stress"], repro="kvcheck stress", seed=1, plan=plan or {}, out=tmp_path, teller=Terminal(is_quiet=quiet)
    )


def test_a_log_gets_a_line_each_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(lines.time, "monotonic", lambda: now)
    session = made(tmp_path)
    for now in (101.0, 129.0, 130.5, 131.0, 160.0, 160.6):
        session.progress(f"at {now}")
    assert capsys.readouterr().err == "kvcheck: 0:30: at 130.5\nkvcheck: 1:00: at 160.6\n"


@pytest.mark.parametrize(("within", "share"), [(None, 0.25), (1, None)])
def test_progress_counts_cells_schedules_and_findings(
    within: int | None, share: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, told = made(tmp_path), []
    monkeypatch.setattr(session, "progress", lambda *given: told.append(given))
    cell = ScheduleCell(plan=Plan(scenario="hicache", shape="llama-3-micro"), wanted=8, floor=1, within=within)
    session.cells[cell.id] = cell
    session.add(cell, (), Evidence(schedules=2), 0.1)
    ((text, done),) = told
    assert text == "0 findings, 0 of 1 cell judged, 2 schedules, now hicache/llama-3-micro"
    assert done == share, "8 are workloads where schedules are explored"


def test_a_run_that_prints_json_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "HEARTBEAT_S", 0.0)
    session = made(tmp_path, quiet=True)
    session.progress("now")
    session.clear_progress()
    assert capsys.readouterr() == ("", "")
