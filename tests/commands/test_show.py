"""`kvcheck show`: which finding a command line means, what is printed and written, and one clear line for wrong input.

Invariants:
- Nothing is run: all records here are literal.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.literal_record import FAILED, FOREIGN, PASSED, STORY, UNTOLD

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord
from kvcheck.core.run.store import RunStore

OLDER, NEWER, GREEN = "20260101-000000-aaaaaaaa", "20260102-000000-bbbbbbbb", "20260103-000000-cccccccc"


def record(run_id: str) -> RunRecord:
    """A run with a cause that has a story, its symptom, a cause without one, and one with a reason."""
    rows = (
        replace(FOREIGN, id=f"{run_id}.1", story=STORY),
        replace(FOREIGN, id=f"{run_id}.2", code="KV501", message="a symptom", cause=f"{run_id}.1"),
        replace(FOREIGN, id=f"{run_id}.3", code="KV104", schedule="a:shape=b", message="no story at all"),
        replace(FOREIGN, id=f"{run_id}.4", code="KV901", story=UNTOLD),
    )
    return replace(FAILED, run_id=run_id, findings=rows)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for each in (record(OLDER), record(NEWER)):
        RunStore(tmp_path).save(each)
    return tmp_path


def shown(out: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["show", *arguments, "--out", str(out)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ([], f" {NEWER}.1  KV102"),
        (["1"], f" {NEWER}.1  KV102"),
        ([OLDER], f" {OLDER}.1  KV102"),
        (["20260101", "1"], f" {OLDER}.1  KV102"),
        ([f"{OLDER}.1"], f" {OLDER}.1  KV102"),
        ([f"{OLDER}#1"], f" {OLDER}.1  KV102"),
        (["20260101#0003"], f" {OLDER}.3  KV104"),
        ([OLDER, f"{OLDER}.1"], f" {OLDER}.1  KV102"),
        ([OLDER, "0003"], f" {OLDER}.3  KV104"),
        (["2"], f" finding {NEWER}.2 is a symptom of {NEWER}.1, whose story this is"),
    ],
)
def test_the_finding_that_is_meant_is_shown(
    arguments: list[str], first: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, error = shown(out, capsys, *arguments)
    assert (code, error) == (0, "") and printed.startswith(first)


def test_a_run_is_also_named_by_its_folder_or_its_file(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (out / OLDER, out / OLDER / "run.json"):
        for arguments in ((str(path), "1"), (f"{path}#1",)):
            assert shown(out, capsys, *arguments)[1].startswith(f" {OLDER}.1")


@pytest.mark.parametrize(
    ("number", "why"), [("3", "its record has no story"), ("4", "there was no time to run the schedule once more")]
)
def test_a_finding_without_a_story_says_why(
    number: str, why: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = shown(out, capsys, NEWER, number)
    assert code == 0 and f"    story   none: {why}" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "no run 'nowhere'"),
        (["nowhere", "1"], "no run 'nowhere'"),
        (["nowhere.1"], "no run 'nowhere'"),
        (["nowhere#1"], "no run 'nowhere'"),
        ([f"{OLDER}#9"], "has no finding '9'"),
        ([f"{OLDER}#1:proof"], "a proof has no story of its own; leave :proof out"),
        ([f"{OLDER}#1:small"], "a smaller schedule has no story of its own; leave :small out"),
        ([f"{OLDER}#1", "1"], f"no run '{OLDER}#1'"),
        (["2026"], "has no finding '2026'"),
        ([OLDER, "9"], "has no finding '9': expected a number from 1 to 4, or an id"),
        ([OLDER, "0"], "has no finding '0'"),
        ([OLDER, "-1"], "No such option"),
        ([OLDER, "one"], "has no finding 'one'"),
        ([OLDER, "\u0663"], "has no finding"),
        ([OLDER, "1" * 5000], "has no finding"),
        ([GREEN], "no run"),
        ([OLDER, "1", "-o", "perfetto"], "expected FORMAT=PATH"),
        ([OLDER, "1", "-o", "html=x.html"], "unknown format of a story 'html'"),
        ([OLDER, "3", "-o", "perfetto=x.json"], "has no story"),
        ([OLDER, "4", "-o", "perfetto=x.json"], "has no story: there was no time"),
        ([OLDER, "1", "-o", "perfetto=/"], "expected the name of a file, got a folder"),
        ([OLDER, "1", "--format", "xml"], "--format: expected one of text, json"),
        ([OLDER, "1", "2"], "unexpected extra argument"),
    ],
)
def test_wrong_input_is_one_clear_line(
    arguments: list[str], complaint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, error = shown(out, capsys, *arguments)
    assert (code, printed) == (2, "") and error.count("\n") == 1
    assert complaint.lower() in error.lower()


def test_a_green_run_has_nothing_to_show(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunStore(out).save(replace(PASSED, run_id=GREEN))
    code, _, error = shown(out, capsys, GREEN)
    assert code == 2 and "has no findings to show; its verdict is pass" in error
    assert shown(out, capsys)[1].startswith(f" {NEWER}.1  KV102")


def test_without_any_run_the_line_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = shown(tmp_path / "none", capsys)
    assert code == 2 and "make one with `kvcheck stress`" in error


def test_a_trace_is_written_beside_the_text(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = out / "deep" / "trace.json"
    code, printed, _ = shown(out, capsys, "2", "-o", f"perfetto={path}")
    assert code == 0 and printed.endswith(f" perfetto {path}\n")
    assert json.loads(path.read_text(encoding="ascii"))["otherData"]["finding"] == f"{NEWER}.1"
    assert [each.name for each in path.parent.iterdir()] == ["trace.json"]


def test_the_record_is_not_overwritten(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = out / NEWER / "run.json"
    before = file.read_bytes()
    code, _, error = shown(out, capsys, "1", "-o", f"perfetto={file}")
    assert code == 2 and "expected another file than the record" in error and file.read_bytes() == before


def test_json_is_the_story_alone(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = shown(out, capsys, "1", "--format", "json")
    assert code == 0 and json.loads(printed)["steps"][0]["lane"] == "forward"


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "--help"]) == 0
    assert "kvcheck show 20260102#2 -o perfetto=trace.json" in " ".join(capsys.readouterr().out.split())
