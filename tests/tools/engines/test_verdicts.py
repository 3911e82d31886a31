"""The script that judges releases: a verdict is counted as the same only where its line gave it each time."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pandas
import pytest
from fakes.engine import environment

from kvcheck.commands.main import run
from kvcheck.core.base.record import read_record
from tools.engines import verdicts


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
