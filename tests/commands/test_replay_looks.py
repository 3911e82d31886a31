"""`kvcheck replay` seen from outside: a profile of a schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.stress.runner import ScheduleRunner

SMALL = "hicache:shape=llama-3-tiny,seed=1,schedule=0,requests=12"
BROKEN = "hicache:shape=llama-3-tiny,seed=1,schedule=0,mutant=gate-waits-wrong-entry"


def events(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


@pytest.mark.schedules
@pytest.mark.parametrize(("line", "code", "told"), [(SMALL, 0, "PASS"), (BROKEN, 1, "FAIL")])
def test_a_profile_names_the_operations_and_keeps_the_verdict(
    line: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert run(["replay", line, "--profile", str(path)]) == code
    said = capsys.readouterr().out
    assert f" {told}  hicache/llama-3-tiny: " in said and "ui.perfetto.dev" in said
    names = {str(each.get("name")) for each in events(path)}
    assert {"decode.write", "decode.read", "hicache.backup"} <= names
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.schedules
def test_lanes_that_are_threads_are_threads_of_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert run(["replay", f"{SMALL},backend=threads,device=threads", "--profile", str(path)]) in (0, 4)
    of = {
        str(each["name"]): each["tid"] for each in events(path) if str(each.get("name")).startswith(("decode.r", "hic"))
    }
    assert len(set(of.values())) > 1, of


def test_a_profile_that_is_interrupted_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(runner: ScheduleRunner, plan: object, **given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ScheduleRunner, "run", interrupted)
    assert run(["replay", SMALL, "--profile", str(tmp_path / "profile.json")]) == 130
    assert list(tmp_path.iterdir()) == []
