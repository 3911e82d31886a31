"""`-o` with formats for CI: where they are written, what goes to stdout, what is refused before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rigs import ci_readers
from rigs.literal_record import FAILED, PASSED

from kvcheck.commands.main import run
from kvcheck.core.run.store import RunStore

GIVEN = ["stress", "retract-resume", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3", "--no-reports"]


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a step, in which an earlier command has written."""
    path = tmp_path / "step_summary"
    path.write_text("earlier\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a failed and a passed run."""
    for record in (FAILED, PASSED):
        RunStore(tmp_path / "runs").save(record)
    return tmp_path / "runs"


def test_github_on_stdout_is_commands_and_adds_a_summary(
    stored: Path, summary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", FAILED.run_id, "--out", str(stored), "-o", "github=-"]) == 0
    printed = capsys.readouterr()
    assert {level for level, _, _ in ci_readers.github(printed.out)} == {"error", "warning", "notice"}
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("earlier\n### kvcheck: FAIL, exit 1\n") and printed.err == ""


def test_a_file_of_commands_adds_no_summary(stored: Path, summary: Path, tmp_path: Path) -> None:
    for command in ("report", "gate"):
        path = tmp_path / f"{command}.txt"
        run([command, FAILED.run_id, "--out", str(stored), "-o", f"github={path}"])
        assert any(level == "error" for level, _, _ in ci_readers.github(path.read_text(encoding="utf-8")))
    assert summary.read_text(encoding="utf-8") == "earlier\n"


@pytest.mark.parametrize("variable", [None, "", "folder"])
def test_without_a_file_for_the_summary_the_commands_are_printed_and_a_warning(
    variable: str | None,
    stored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    if variable is not None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", variable and str(tmp_path))
    assert run(["gate", FAILED.run_id, "--out", str(stored), "-o", "github=-"]) == 1, "the verdict stays"
    printed = capsys.readouterr()
    assert ci_readers.github(printed.out) and printed.out.endswith(" exit 1\n")
    assert printed.err.startswith("kvcheck: warning: ") and "step summary" in printed.err


def test_several_runs_get_a_file_each_with_its_ending(stored: Path, tmp_path: Path) -> None:
    runs = [FAILED.run_id, PASSED.run_id, "--out", str(stored)]
    assert run(["report", *runs, "-o", f"junit={tmp_path / 'ci'}", "-o", f"gitlab={tmp_path / 'ci'}"]) == 0
    names = sorted(path.name for path in (tmp_path / "ci").iterdir())
    assert names == sorted(f"{each}{end}" for each in runs[:2] for end in (".junit.xml", ".gitlab.json"))
    for path in (tmp_path / "ci").glob("*.xml"):
        ci_readers.junit(path.read_text(encoding="utf-8"))


@pytest.mark.schedules
def test_a_run_and_its_gate_write_all_formats(
    tmp_path: Path, summary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = {"junit": "junit.xml", "gitlab": "quality.json", "sarif": "kvcheck.sarif"}
    outputs = [word for name, file in formats.items() for word in ("-o", f"{name}={tmp_path / file}")]
    bug = ["--mutant", "offload-value-aliases-pool", "--seed", "1", "--no-reports"]
    out = ["--out", str(tmp_path / "runs")]
    assert run(["stress", *bug, *out, *outputs, "-o", "github=-"]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == " exit 1"
    suite = ci_readers.junit((tmp_path / "junit.xml").read_text(encoding="utf-8"))
    (failure,) = suite.iter("failure")
    (path,) = (tmp_path / "runs").glob("*/run.json")
    code = json.loads(path.read_text(encoding="utf-8"))["findings"][0]["code"]
    assert failure.get("type") == code and "next: kvcheck replay " in str(failure.text)
    assert code in [entry["check_name"] for entry in ci_readers.gitlab((tmp_path / "quality.json").read_text())]
    assert code in {each["ruleId"] for each in ci_readers.sarif((tmp_path / "kvcheck.sarif").read_text())["results"]}
    assert any(code in title for level, title, _ in ci_readers.github(printed) if level == "error")
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("earlier\n### kvcheck stress: FAIL, exit 1") and "```\nkvcheck replay " in text
