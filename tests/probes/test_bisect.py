"""Causes of a change, found by bisecting, and what the documentation says of real findings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.engine import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").partition("### Find the commit")[2]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
COMMITS, BROKEN = 6, 3
DOCS = Path(__file__).parents[2] / "docs"
HELPER = "on_cpu.py"
SCRIPTS = sorted(path for path in (DOCS / "findings").glob("*.py") if path.name != HELPER)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def history(folder: Path) -> str:
    """A repository with the stand-in for SGLang, in which one commit loses the index buffer. Returns that commit."""
    top = folder / "python"
    shutil.copytree(ROOT / "tests" / "fakes" / "sglang", top, ignore=shutil.ignore_patterns("__pycache__"))
    (top / "sglang_fault.py").write_text('"""Beside this file is the fault."""\n')
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "-q", ".")
    commits = []
    for number in range(COMMITS):
        (top / "fault").write_text("index-lost" if number >= BROKEN else "")
        (top / "news.txt").write_text(f"change {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"change {number}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    git(folder, "tag", "BAD", commits[-1])
    git(folder, "tag", "GOOD", commits[0])
    return commits[BROKEN]


@pytest.mark.processes
@pytest.mark.schedules
def test_the_recipe_finds_the_commit(tmp_path: Path) -> None:
    script, commands = re.findall(r"^```(?:sh)?\n(.*?)^```", PAGE.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    source = tmp_path / "sglang"
    source.mkdir()
    guilty = history(source)
    env = environment(tmp_path / "envs" / "fork", None)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "__editable__.sglang.pth").write_text(f"{source / 'python'}\n")
    (tmp_path / "bisect.sh").write_text(script)
    kvcheck = tmp_path / "bin" / "kvcheck"
    kvcheck.parent.mkdir()
    kvcheck.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kvcheck "$@"\n')
    kvcheck.chmod(0o755)
    variables = {
        **os.environ,
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PATH": f"{kvcheck.parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(["sh", "-ec", commands], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{guilty} is the first bad commit" in done.stdout, done.stdout + done.stderr
    assert git(source, "status", "--porcelain") == ""
    bare = environment(tmp_path / "bare", None)
    for target, status in ((f"sglang:{bare}", 125), ("nothing", 128)):
        step = ["sh", str(tmp_path / "bisect.sh")]
        assert subprocess.run(step, env={**variables, "TARGET": target}, capture_output=True).returncode == status


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_needs_nothing_of_ours(path: Path) -> None:
    assert not re.search(r"\b(kvcheck|tests|importlib|__import__)\b", path.read_text())


def test_every_script_is_listed_with_what_it_said() -> None:
    listed = set(
        re.findall(r"findings/(\w+\.py)", (DOCS / "releases.md").read_text() + (DOCS / "mooncake.md").read_text())
    )
    assert listed - {HELPER} == {path.name for path in SCRIPTS}
