"""The nightly workflow of docs/ci, run on this machine: newest releases and pre-releases of the engines.

    PYTHONPATH=tests python -m tools.engines.nightly OUT [--engines sglang vllm lmcache] [--releases newest pre]

OUT/checkout is this commit, OUT/runner what the steps install. OUT/nightly.csv has a row for each job, OUT/results what
each left. Exit 0: every job was green; 1: not; 2: something before them failed.

Invariants:
- Every `run` step of the job is run as it is printed, with nothing that stands in.
- Nothing here judges: the exit code and the version are those of the steps.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import yaml

from kvcheck.core.run.store import write_text
from tools.engines.command import PROJECT, end, say
from tools.engines.workflow import TORCH, run_job, runner

WORKFLOW = "docs/ci/github-nightly.yml"


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    out = Path(asked.out).resolve()
    checkout, programs = _checkout(out / "checkout"), runner(out / "runner")
    workflow = yaml.safe_load((checkout / WORKFLOW).read_text(encoding="utf-8"))
    rows = []
    for engine in asked.engines:
        for release in asked.releases:
            rows.append(_row(workflow, checkout, programs, out / "results", engine=engine, release=release))
            write_text(out / "nightly.csv", str(pandas.DataFrame(rows).to_csv(index=False)))
            say(" ".join(f"{name}={value}" for name, value in rows[-1].items()))
    return 0 if all(row["exit_code"] == 0 for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The nightly workflow's steps, run on this machine.")
    parser.add_argument("out", help="folder for the checkout, what its workflow installs, and results")
    parser.add_argument("--engines", nargs="+", default=["sglang", "vllm", "lmcache"])
    parser.add_argument("--releases", nargs="+", choices=["newest", "pre"], default=["newest", "pre"])
    return parser


def _checkout(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packed = subprocess.run(["git", "-C", str(PROJECT), "archive", "HEAD"], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def _row(
    workflow: dict[str, Any], checkout: Path, programs: Path, results: Path, *, engine: str, release: str
) -> dict[str, object]:
    shutil.rmtree(checkout / "envs", ignore_errors=True)
    variables = {**workflow["env"], "TORCH": TORCH, "ENGINE": engine, "RELEASE": release}
    left = results / f"{engine}-{release}"
    done, facts = run_job(workflow["jobs"]["engines"]["steps"], checkout, programs, left, variables)
    version = done.variables.strip().removeprefix("VERSION=")
    return {"engine": engine, "release": release, "version": version, **facts}


if __name__ == "__main__":
    sys.exit(end("nightly", main))
