"""`python -m tools.mutation`: what it refuses, what it keeps and prints, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mutation.__main__ import main
from tools.mutation.edits import PACKAGE
from tools.mutation.results import read_results

CELL = ["--scenario", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "2", "--jobs", "1"]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ('[{"name": "a", "expect": ["KV999"], "edits": [{}]}]', "expected codes of kvcheck list codes"),
        (
            '[{"name": "a", "edits": [{"file": "../core/cache/offload.py", "old": "a", "new": "b"}]}]',
            "below kvcheck/core",
        ),
        (
            '[{"name": "a", "edits": [{"file": "core/cache/offload.py", "old": "self", "new": ""}]}]',
            "once in core/cache",
        ),
        ('[{"name": "a", "edits": [{"file": "core/cache/offload.py", "old": "import torch", "new": "("}]}]', "compile"),
    ],
)
def test_a_list_by_hand_that_cannot_be_put_in_exits_2(
    rows: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bugs.json"
    path.write_text(rows)
    assert main(["--edits", str(path), "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err


def interrupt(*_: object) -> str:
    raise KeyboardInterrupt


@pytest.mark.processes
@pytest.mark.schedules
def test_a_campaign_is_kept_goes_on_and_is_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    typed = ["offload.py", "--operator", "turn-comparison", "--sample", "4", "--cpu", "2", *CELL]
    assert main([*typed, "--out", str(out)]) == 0
    campaign, results = read_results(out)
    assert len(results) == 4 and campaign.cells == "retract-resume llama-3-tiny"
    killed = [each for each in results.values() if each.is_kill]
    assert killed and all(each.line.startswith("retract-resume:") for each in killed)

    kept = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(kept[:-2]))
    with monkeypatch.context() as patch:
        patch.setattr("tools.mutation.__main__._line", interrupt)
        assert main([*typed, "--out", str(out)]) == 130
    assert "4 edits, 2 judged before" in capsys.readouterr().out
    assert len(read_results(out)[1]) == 3, "the result that came before the signal"
    assert main([*typed, "--out", str(out)]) == 0
    outcomes = {name: each.outcome for name, each in results.items()}
    assert {name: each.outcome for name, each in read_results(out)[1].items()} == outcomes

    assert main(["--again", str(out), *CELL, "--cpu", "2", "--out", str(again)]) == 0
    repeated = read_results(again)[1]
    assert {name: each.outcome for name, each in repeated.items()} == outcomes
    assert all(repeated[each.id].schedules == 1 for each in killed), "the plan that killed it comes first"
    assert main(["--again", str(out), "--out", str(out)]) == 2


@pytest.mark.processes
@pytest.mark.schedules
def test_a_bug_by_hand_is_found_with_the_code_that_was_expected(tmp_path: Path) -> None:
    file, old = "core/cache/offload.py", "after=(behind,),"
    assert (PACKAGE / file).read_text().count(old) == 1
    edit = {"file": f"kvcheck/{file}", "old": old, "new": ""}
    raises = {"file": file, "old": old, "new": "after=(undefined,),"}
    bugs = [
        {"name": "save-early", "link": "https://example.org", "expect": ["KV201", "KV902"], "edits": [raises]},
        {"name": "other-code", "expect": ["KV102"], "edits": [raises]},
        {"name": "any", "edits": [edit]},
    ]
    path = tmp_path / "bugs.json"
    path.write_text(json.dumps(bugs))
    assert main(["--edits", str(path), "--cpu", "2", *CELL, "--out", str(tmp_path / "out")]) == 0
    results = read_results(tmp_path / "out")[1]
    assert results["save-early"].is_expected and results["save-early"].link == "https://example.org"
    assert not results["other-code"].is_expected and results["other-code"].is_kill
    assert results["any"].schedules and results["any"].reaching == 1
