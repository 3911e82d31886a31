"""Workflow files checked by hand, and their `run` steps run as a CI runner runs them.

Stand-ins for `python -m pip`, new environments and `kvcheck env` write down what would be installed, without a network.
All else of a step is run. With programs of the caller's own nothing stands in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CI = ROOT / "docs" / "ci"
KEPT_VARIABLES = ("HOME", "LANG", "TMPDIR")
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
STEP_KEYS = {"name", "uses", "with", "run", "env", "if", "shell", "working-directory"}
JOB_KEYS = {"runs-on", "timeout-minutes", "strategy", "env", "steps"}
TOP_KEYS = {"name", "on", "permissions", "concurrency", "env", "jobs"}
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
KEPT = re.compile(r"\|\|\s*\w+=\$\?")
"""A step that goes on after a failure, with its exit code in a variable. Its last line has to give the verdict."""
HIDDEN = re.compile(r"\|\|\s*(true|:)|set \+e|continue-on-error|allow_failure")

STAND_IN = """#!/usr/bin/env bash
if [ "$1 $2" = "-m pip" ]; then
  shift 2
  echo "$@" >> "$INSTALLED"
  if [ "$1" = index ]; then echo "$4${3:+ }(9.9.9)"; fi
  exit 0
fi
if [ "$1 $2" = "-m venv" ]; then
  dir="${@: -1}"
  mkdir -p "$dir/bin"
  cp "$0" "$dir/bin/python"
  cp "$(dirname "$0")/kvcheck" "$dir/bin/kvcheck"
  exit 0
fi
exec "$REAL_PYTHON" "$@"
"""
KVCHECK = """#!/usr/bin/env bash
if [ "$1" = env ]; then
  echo "$@" >> "$INSTALLED"
  exit 0
fi
exec "$REAL_PYTHON" -m kvcheck "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What running steps gave. exit_code: of the first step that failed, or 0."""

    exit_code: int
    failed: str | None
    output: str
    summary: str
    installed: str
    variables: str


def faults(text: str, workflow: Mapping[Any, Any]) -> list[str]:
    """What a runner or a careful reader would refuse in a workflow of GitHub Actions. text: the file's."""
    found = [f"unknown key {key!r}" for key in workflow if {True: "on"}.get(key, key) not in TOP_KEYS]
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions: expected contents: read alone")
    if True not in workflow or "pull_request_target" in workflow[True]:
        found.append("on: expected a trigger that gives no secrets to a pull request")
    if hidden := HIDDEN.search(text):
        found.append(f"a verdict is hidden: {hidden[0]}")
    for name, job in workflow["jobs"].items():
        found += [f"{name}: unknown key {key!r}" for key in job.keys() - JOB_KEYS]
        found += [f"{name}: no {key}" for key in ("runs-on", "timeout-minutes", "steps") if not job.get(key)]
        found += [f"{name}: {fault}" for step in job.get("steps", ()) for fault in step_faults(step)]
        verdicts = [
            step["name"] for step in job.get("steps", ()) if re.search(r"\bkvcheck (?!env )[\w$]", step.get("run", ""))
        ]
        if len(verdicts) != 1:
            found.append(f"{name}: expected one step with a verdict, got {verdicts}")
    return found


def step_faults(step: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"unknown key {key!r}" for key in step.keys() - STEP_KEYS)
    if ("uses" in step) == ("run" in step):
        yield f"expected uses or run: {sorted(step)}"
    if "uses" in step and not PINNED.fullmatch(step["uses"]):
        yield f"{step['uses']} is not pinned to a commit"
    if EXPRESSION.search(step.get("run", "")):
        yield f"{step.get('name')}: an expression in a script can bring in code; pass it by env"
    if KEPT.search(step.get("run", "")) and not step["run"].rstrip().splitlines()[-1].startswith("kvcheck gate "):
        yield f"{step.get('name')}: a verdict is kept and not judged"
    if "run" in step and not step.get("name"):
        yield "a step without a name"


def run_steps(
    steps: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    env: Mapping[str, str],
    names: tuple[str, ...] | None = None,
    programs: Path | None = None,
    limit_s: float = 240,
) -> Done:
    """Run the `run` steps in a checkout. names: those that need no network; None: all. programs: a folder with python
    and kvcheck that are run as they are; None: stand-ins. limit_s: of a step."""
    tools = folder / ".tools"
    tools.mkdir(parents=True, exist_ok=programs is not None)
    files = {name: tools / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ENV")}
    installed = tools / "installed"
    for path in (*files.values(), installed):
        path.write_text("", encoding="utf-8")
    around = {
        **{name: value for name, value in os.environ.items() if name in KEPT_VARIABLES},
        **(_stand_ins(tools, installed) if programs is None else {}),
        "PATH": f"{programs or tools}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **{name: str(path) for name, path in files.items()},
        **env,
    }
    code, failed, output = 0, None, ""
    for step in steps:
        if "run" not in step or (names is not None and step["name"] not in names):
            continue
        if failed is not None and "cancelled()" not in step.get("if", "") and "always()" not in step.get("if", ""):
            continue
        new = dict(line.split("=", 1) for line in files["GITHUB_ENV"].read_text(encoding="utf-8").splitlines())
        own = {name: str(value) for name, value in step.get("env", {}).items() if not EXPRESSION.search(str(value))}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={**around, **new, **own},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        output += done.stdout + done.stderr
        if done.returncode and failed is None:
            code, failed = done.returncode, step["name"]
    return Done(
        exit_code=code,
        failed=failed,
        output=output,
        summary=files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8"),
        installed=installed.read_text(encoding="utf-8"),
        variables=files["GITHUB_ENV"].read_text(encoding="utf-8"),
    )


def _stand_ins(tools: Path, installed: Path) -> dict[str, str]:
    for name, text in (("python", STAND_IN), ("python3", STAND_IN), ("kvcheck", KVCHECK)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    return {"REAL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "INSTALLED": str(installed)}
