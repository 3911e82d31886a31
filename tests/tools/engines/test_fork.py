"""Programs about releases of engines: a fork's edits, and the verdicts of releases."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pandas
import pytest
from fakes.engine import environment

from kvcheck.commands.main import run
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.record import read_record
from kvcheck.core.probes.sglang import SGLANG
from tools.engines import verdicts
from tools.engines.fork_edits import EDITS, Change, Edit, Unchanged, apply

EDIT = Edit(
    name="two-files",
    bug="a",
    upstream="#1",
    shows="two lines are gone",
    changes=(
        Change(file="one.py", pattern=r"\n +wait\(\)", text="", times=2),
        Change(file="two.py", pattern=r"copy\((\w+)\)", text=r"\1"),
    ),
    cell="retract-resume/retract.nsa",
    code="KV304",
)


def test_an_edit_changes_its_lines_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a\n  wait()\nb\n    wait()\nc\n")
    (tmp_path / "two.py").write_text("get = copy(row)\n")
    apply(EDIT, tmp_path)
    assert (tmp_path / "one.py").read_text() == "a\nb\nc\n"
    assert (tmp_path / "two.py").read_text() == "get = row\n"


@pytest.mark.parametrize("other", ["get = row\n", "get = copy(row), copy(row)\n"])
def test_where_the_lines_are_others_nothing_is_written(other: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a\n  wait()\n  wait()\n")
    (tmp_path / "two.py").write_text(other)
    with pytest.raises(Unchanged, match=r"two-files: two\.py has its lines [02] times, expected 1"):
        apply(EDIT, tmp_path)
    assert (tmp_path / "one.py").read_text() == "a\n  wait()\n  wait()\n"


def test_there_is_an_edit_of_every_bug_and_each_names_a_cell_that_a_probe_has() -> None:
    assert {edit.bug for edit in EDITS} == set("abcde") and len({edit.name for edit in EDITS}) == len(EDITS)
    for edit in EDITS:
        scenario, _, shape = edit.cell.partition("/")
        probe, _, subject = shape.partition(".")
        row = SGLANG.probe(probe)
        assert row is not None and row.scenario == scenario and subject in row.subjects, edit.cell
        assert edit.code in CODES


def said(folder: Path, *arguments: str) -> str:
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as text:
        run([*arguments])
    return text.getvalue()


@pytest.mark.processes
def test_each_line_is_replayed_and_another_verdict_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_kvcheck", said)
    environment(tmp_path / "envs" / "lmcache-1", "")
    asked = [str(tmp_path), "lmcache=1", "--times", "3", "--schedules", "12"]
    assert verdicts.main(asked) == 0
    table = pandas.read_csv(tmp_path / "replays.csv")
    assert len(table) == 4 and set(table["agreed"]) == {3} and all(table["same"])
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_record(folder)
    assert (tmp_path / "releases.html").is_file()
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"verdict": "pass"', '"verdict": "unknown"'))
    rows = verdicts._replayed(tmp_path, record.run_id, 1)
    assert [(row["verdict"], row["replayed"], row["same"]) for row in rows] == [("unknown", "pass", False)] * 4
