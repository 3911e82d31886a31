"""`python -m tools.mutation`: what it refuses, what it keeps and prints, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mutation.__main__ import main
from tools.mutation.edits import PACKAGE
from tools.mutation.results import read_results

CELL = ["--scenario", "retract-resume", "--shape", "llama-3-tiny", "--schedules", "2", "--jobs", "1"]


def status_of(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["hicach"], "hicach"),
        (["--operator", "drop"], "--operator"),
        (["--sample", "0"], "--sample"),
        (["--cpu", "0"], "--cpu"),
        (["--survivors"], "--again"),
        (["--edits", "bugs.json", "--sample", "3"], "--edits"),
        (["--again", "nowhere"], "nowhere"),
        (["pools/nsa.py", "--operator", "turn-loop"], "no edit is left"),
        (["pools/nsa.py", "--scenario", "retract"], "'retract'"),
    ],
)
def test_bad_usage_exits_2_before_anything_runs(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of([*arguments, "--out", "results"]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "results" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("{}", "expected a JSON list"),
        ('[{"name": "a"}]', "a: expected name and edits, and if you like link"),
        ('[{"name": "a", "expect": ["KV999"], "edits": [{}]}]', "expected codes of kvcheck list codes"),
        ('[{"name": "a", "edits": [{"file": "commands/main.py", "old": "a", "new": "b"}]}]', "below kvcheck/core"),
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
    printed = capsys.readouterr().out
    assert "4 edits, 0 judged before" in printed and " surveyed    retract-resume/llama-3-tiny" in printed
    campaign, results = read_results(out)
    assert len(results) == 4 and campaign.cells == "retract-resume llama-3-tiny"
    killed = [each for each in results.values() if each.is_kill]
    assert killed and all(each.line.startswith("retract-resume:") for each in killed)
    assert "## Kills by oracle" in (out / "edits.md").read_text()

    kept = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(kept[:-2]))
    with monkeypatch.context() as patch:
        patch.setattr("tools.mutation.__main__._line", interrupt)
        assert main([*typed, "--out", str(out)]) == 130
    printed = capsys.readouterr()
    assert "4 edits, 2 judged before" in printed.out and "what was judged is kept" in printed.err
    assert len(read_results(out)[1]) == 3, "the result that came before the signal"
    assert main([*typed, "--out", str(out)]) == 0
    assert "4 edits, 3 judged before" in capsys.readouterr().out
    assert {name: each.outcome for name, each in read_results(out)[1].items()} == {
        name: each.outcome for name, each in results.items()
    }

    assert main(["--again", str(out), *CELL, "--cpu", "2", "--out", str(again)]) == 0
    repeated = read_results(again)[1]
    assert {name: each.outcome for name, each in repeated.items()} == {n: each.outcome for n, each in results.items()}
    assert all(repeated[each.id].schedules == 1 for each in killed), "the plan that killed it comes first"
    assert main(["--again", str(out), "--out", str(out)]) == 2


@pytest.mark.processes
@pytest.mark.schedules
def test_a_bug_by_hand_is_found_with_the_code_that_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, old = "core/cache/offload.py", "after=(behind,),"
    assert (PACKAGE / file).read_text().count(old) == 1
    edit = {"file": f"kvcheck/{file}", "old": old, "new": ""}
    raises = {"file": file, "old": old, "new": "after=(undefined,),"}
    bugs = [
        {
            "name": "save-early",
            "link": "https://example.org",
            "what": "w",
            "expect": ["KV201", "KV902"],
            "edits": [raises],
        },
        {"name": "other-code", "link": "", "what": "", "expect": ["KV102"], "edits": [raises]},
        {"name": "any", "link": "", "what": "", "expect": [], "edits": [edit]},
    ]
    path = tmp_path / "bugs.json"
    path.write_text(json.dumps(bugs))
    assert main(["--edits", str(path), "--cpu", "2", *CELL, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    results = read_results(tmp_path / "out")[1]
    assert results["save-early"].is_expected and results["save-early"].link == "https://example.org"
    assert not results["other-code"].is_expected and results["other-code"].is_kill
    assert printed.count("(not as expected)") == 1
    assert results["any"].schedules and results["any"].reaching == 1
