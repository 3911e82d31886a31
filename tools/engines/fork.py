"""A fork of SGLang into which pull requests bring the five bugs back, judged here by the workflow of docs/ci.

    PYTHONPATH=tests python -m tools.engines.fork OUT [--release 0.5.23] [--only NAME] [--arguments "--schedules 12"]

OUT/fork is the repository: the files of the release's wheel, the workflow, and the baseline of this checkout. Its main
branch is judged first and has to be green, then one branch for each edit, which has to be red and to name the edit's
cell and code. OUT/runner has what the steps install: kvcheck as a wheel of this checkout, and its torch. OUT/results
has what each run left, OUT/fork.csv a row for each. A call goes on where one was interrupted: a branch with a result is
not judged again, unless --only names it. Exit 0: all as expected; 1: not all; 2: a step before them failed.

Invariants:
- Every `run` step of the workflow is run as it is printed, with nothing that stands in. Its variables are its own, but
  for those that a fork sets: what is installed, the baseline, and the number of schedules.
- Nothing here judges: exit codes, cells and codes are read from what the workflow's step leaves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pandas
import yaml
from packaging.requirements import Requirement
from rigs.ci_runner import CI

from kvcheck.core.run.store import write_text
from tools.engines.command import PROJECT, end, say
from tools.engines.fork_edits import EDITS, Edit, Unchanged, apply
from tools.engines.workflow import TORCH, run_job, runner

BASELINE = ".github/kvcheck-known.toml"
WORKFLOW = ".github/workflows/kvcheck.yml"
FACTS = "facts.json"
GIT = ["git", "-c", "user.name=fork", "-c", "user.email=fork@localhost", "-c", "commit.gpgsign=false"]


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    out = Path(asked.out).resolve()
    wheel = Path(asked.wheel).resolve() if asked.wheel else _kvcheck_wheel(out / "dist")
    programs = runner(out / "runner")
    fork = out / "fork"
    if not (fork / ".git").exists():
        _make_fork(fork, asked.release, out / "dist")
    results = out / "results"
    arguments = f"probe sglang:envs/engine {asked.arguments}"
    chosen = [each for each in (None, *EDITS) if asked.only is None or (each is not None and each.name == asked.only)]
    for edit in chosen:
        if asked.only or not (results / _name(edit) / FACTS).exists():
            _judge(edit, fork, programs, wheel, results, arguments)
        say(" ".join(f"{name}={value}" for name, value in _row(edit, results).items()))
    done = [edit for edit in (None, *EDITS) if (results / _name(edit) / FACTS).exists()]
    rows = [_row(edit, results) for edit in done]
    write_text(out / "fork.csv", str(pandas.DataFrame(rows).to_csv(index=False)))
    return 0 if all(row["as_expected"] for row in rows) and len(done) == len(EDITS) + 1 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A fork of SGLang with the five bugs, judged by the workflow's steps.")
    parser.add_argument("out", help="folder for the fork, what its workflow installs, and results")
    parser.add_argument("--release", default="0.5.23")
    parser.add_argument("--only", choices=[each.name for each in EDITS], help="judge this edit alone. Default: all")
    parser.add_argument("--wheel", help="of kvcheck. Default: one is built of this checkout")
    parser.add_argument("--arguments", default="--schedules 12 --seed 1", help="of kvcheck probe, behind the engine")
    return parser


def _kvcheck_wheel(folder: Path) -> Path:
    for old in folder.glob("kvcheck-*.whl"):
        old.unlink()
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(PROJECT)])
    (wheel,) = folder.glob("kvcheck-*.whl")
    return wheel


def _make_fork(fork: Path, release: str, downloads: Path) -> None:
    download = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
    _run([sys.executable, "-m", "pip", *download, f"sglang=={release}"])
    (wheel,) = downloads.glob(f"sglang-{release}-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(fork / "python", [name for name in packed.namelist() if name.startswith("sglang/")])
    (release_of,) = metadata.distributions(path=[str(wheel)])
    needed = [each for each in (release_of.requires or ()) if "extra" not in str(Requirement(each).marker or "")]
    project = [
        "[project]",
        'name = "sglang"',
        f'version = "{release}"',
        f"dependencies = {json.dumps(needed, indent=1)}",
    ]
    write_text(fork / "python" / "pyproject.toml", "\n".join(project) + "\n")
    write_text(fork / ".gitignore", "__pycache__/\n/envs/\n/build/\n/.tools/\n")
    write_text(fork / WORKFLOW, (CI / "github-pull-request.yml").read_text(encoding="utf-8"))
    write_text(fork / BASELINE, (PROJECT / "reports/baselines/engines.toml").read_text(encoding="utf-8"))
    _git(fork, "init", "-q", "-b", "main", ".")
    _git(fork, "add", ".")
    _git(fork, "commit", "-qm", f"SGLang {release}")


def _name(edit: Edit | None) -> str:
    return "main" if edit is None else edit.name


def _judge(edit: Edit | None, fork: Path, programs: Path, wheel: Path, results: Path, arguments: str) -> None:
    """One pull request, judged by the fork's workflow; None: the main branch as it is. Its results lie in a folder."""
    _git(fork, "checkout", "-q", "--force", "main")
    if edit is not None:
        _git(fork, "checkout", "-q", "-B", edit.name)
        apply(edit, fork / "python" / "sglang")
        _git(fork, "commit", "-qam", edit.shows)
    workflow = yaml.safe_load((fork / WORKFLOW).read_text(encoding="utf-8"))
    own = {"SOURCE": str(wheel), "TORCH": TORCH, "ARGUMENTS": arguments, "BASELINE": BASELINE}
    left = results / _name(edit)
    _, facts = run_job(workflow["jobs"]["kvcheck"]["steps"], fork, programs, left, {**workflow["env"], **own})
    write_text(left / FACTS, json.dumps({**facts, "lines": _lines(fork)}, indent=1) + "\n")


def _row(edit: Edit | None, results: Path) -> dict[str, object]:
    left = results / _name(edit)
    facts = json.loads((left / FACTS).read_text(encoding="utf-8"))
    found = [*_failures(left / "junit.xml")]
    if edit is None:
        is_expected = facts["exit_code"] == 0 and (left / "junit.xml").exists() and not found
        return {"branch": "main", **facts, "failures": "", "as_expected": is_expected}
    return {
        "branch": edit.name,
        **facts,
        "failures": "; ".join(f"{code} {cell}" for cell, code in found),
        "as_expected": (facts["exit_code"], facts["red_step"]) == (1, "kvcheck") and (edit.cell, edit.code) in found,
        "bug": edit.bug,
        "takes_back": edit.upstream,
        "change": edit.shows,
        "expected": f"{edit.code} {edit.cell}",
    }


def _failures(file: Path) -> Iterator[tuple[str, str]]:
    if file.exists():
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            for failure in case.iter("failure"):
                yield str(case.get("name")), str(failure.get("type"))


def _lines(fork: Path) -> str:
    told = _git(fork, "diff", "--numstat", "main").split()
    return f"+{sum(map(int, told[::3]))} -{sum(map(int, told[1::3]))}"


def _git(folder: Path, *arguments: str) -> str:
    return _run([*GIT, "-C", str(folder), *arguments])


def _run(command: Sequence[str]) -> str:
    Path(command[command.index("-C") + 1] if "-C" in command else ".").mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(end("fork", main, Unchanged))
