"""Digests of code, trace and engine: equal for equal files, wherever they lie; and what git says of a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes.engine import environment

import kvcheck
from kvcheck.commands.main import run
from kvcheck.core.base.identity import code_digest, commit_of, file_digest, folder_digest

PACKAGE = Path(kvcheck.__file__).parent
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def written(folder: Path, **files: str) -> Path:
    """A folder with these modules."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """What git answers."""
    return subprocess.run([*GIT, "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout


def trace_of(path: Path, requests: int) -> None:
    """A trace of so many requests."""
    rows = [
        {"timestamp": at, "input_length": 600, "output_length": 8, "hash_ids": [2 * at, 2 * at + 1]}
        for at in range(requests)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def test_a_copy_of_the_package_has_the_same_digest_and_an_edited_one_another(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "elsewhere" / "kvcheck"))
    assert folder_digest(copy) == code_digest() and len(code_digest()) == 64
    (copy / "py.typed").write_text("only code counts", encoding="utf-8")
    assert folder_digest(copy) == code_digest()
    with (copy / "core" / "paging.py").open("a", encoding="utf-8") as stream:
        stream.write("\n")
    assert folder_digest(copy) != code_digest()


@pytest.mark.parametrize("files", [{"a": "1", "b": "2"}, {"a": "12"}, {"b": "12"}, {"a__b": "12"}, {}])
def test_names_and_contents_cannot_be_taken_for_each_other(files: dict[str, str], tmp_path: Path) -> None:
    assert folder_digest(written(tmp_path / "x", a="1", b="")) != folder_digest(written(tmp_path / "y", **files))


@pytest.mark.processes
def test_a_commit_is_that_of_the_tree_that_tracks_the_folder(tmp_path: Path) -> None:
    package = written(tmp_path / "tree" / "package", a="1")
    assert commit_of(package) is None
    git(tmp_path / "tree", "init", "-q")
    ignored = written(tmp_path / "tree" / "venv" / "package", a="1")
    git(tmp_path / "tree", "add", "package")
    git(tmp_path / "tree", "commit", "-qm", "one")
    commit = git(tmp_path / "tree", "rev-parse", "HEAD").strip()
    assert (commit_of(package), commit_of(ignored)) == (commit, None)
    written(package, a="2")
    assert commit_of(package) == f"{commit} and changes"


@pytest.mark.processes
def test_a_variable_of_a_git_hook_names_no_other_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = written(tmp_path / "tree" / "package", a="1")
    for folder in (tmp_path / "tree", tmp_path):
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", folder.name)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    commit = commit_of(package)
    monkeypatch.delenv("GIT_DIR")
    assert commit == git(tmp_path / "tree", "rev-parse", "HEAD").strip()


@pytest.mark.processes
def test_a_record_says_which_files_of_an_engine_it_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = environment(tmp_path / "env", "good")
    command = ["probe", f"sglang:{fake}", "--probe", "retract.nsa", "--seed", "1", "--schedules", "1"]
    run([*command, "--no-reports", "--format", "json", "--out", str(tmp_path / "runs")])
    record = json.loads(capsys.readouterr().out)
    package = Path(__file__).parents[1] / "fakes" / "sglang" / "sglang"
    engine = record["environment"]["engine"]
    assert (engine["files"], engine["commit"]) == (folder_digest(package), commit_of(package))
    assert folder_digest(package) in record["identity"]["target"]
    assert record["identity"]["target"].startswith(f"sglang {engine['version']}")


@pytest.mark.schedules
def test_a_record_names_its_trace_and_is_not_resumed_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "a.jsonl"
    trace_of(trace, 5)
    command = ["stress", "pd-transfer", "--shape", "llama-3-tiny", "--trace", str(trace), "--seed", "1"]
    command += ["--no-reports", "--out", str(tmp_path / "runs")]
    assert run(command) == 0
    (path,) = (tmp_path / "runs").glob("*/run.json")
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw["identity"] == {"code": code_digest(), "trace": file_digest(trace), "target": None}
    path.write_text(json.dumps({**raw, "complete": False, "exit_code": 130}), encoding="utf-8")
    trace_of(trace, 4)
    capsys.readouterr()
    assert run([*command, "--resume"]) == 0
    printed = capsys.readouterr()
    assert (
        f"--resume skips run {raw['run_id']}, which is about something else: the content of the trace was"
        in printed.err
    )
    assert "resuming nothing: all cells start anew" in printed.out
    newest = sorted((tmp_path / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)[-1]
    assert json.loads(newest.read_text(encoding="utf-8"))["evidence"]["requests"] == 4
