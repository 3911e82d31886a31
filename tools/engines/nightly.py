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
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas
import yaml
from rigs.ci_runner import run_steps

from kvcheck.core.run.store import write_text

PROJECT = Path(__file__).resolve().parents[2]
WORKFLOW = "docs/ci/github-nightly.yml"
TORCH = "torch==2.13.0"
LIMIT_S = 3600.0


def main(arguments: Sequence[str]) -> int:
    """All of it."""
    asked = _parser().parse_args(arguments)
    out = Path(asked.out).resolve()
    checkout, programs = _checkout(out / "checkout"), _runner(out / "runner")
    workflow = yaml.safe_load((checkout / WORKFLOW).read_text(encoding="utf-8"))
    rows = []
    for engine in asked.engines:
        for release in asked.releases:
            rows.append(_row(workflow, checkout, programs, out / "results", engine=engine, release=release))
            write_text(out / "nightly.csv", str(pandas.DataFrame(rows).to_csv(index=False)))
            _say(" ".join(f"{name}={value}" for name, value in rows[-1].items()))
    return 0 if all(row["exit_code"] == 0 for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The nightly workflow's steps, run on this machine.")
    parser.add_argument("out", help="folder for the checkout, what its workflow installs, and results")
    parser.add_argument("--engines", nargs="+", default=["sglang", "vllm", "lmcache"])
    parser.add_argument("--releases", nargs="+", choices=["newest", "pre"], default=["newest", "pre"])
    return parser


def _checkout(folder: Path) -> Path:
    """The commit of this checkout, as a runner of CI would have it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packed = subprocess.run(["git", "-C", str(PROJECT), "archive", "HEAD"], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def _runner(folder: Path) -> Path:
    """An environment for the steps. Returns the folder of its programs."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # A build of the same version would be taken as installed.
    uninstall = ["-m", "pip", "uninstall", "--quiet", "--yes", "kvcheck"]
    subprocess.run([str(folder / "bin" / "python"), *uninstall], check=True)
    return folder / "bin"


def _row(
    workflow: dict[str, dict[str, dict[str, list[dict[str, object]]]]],
    checkout: Path,
    programs: Path,
    results: Path,
    *,
    engine: str,
    release: str,
) -> dict[str, object]:
    """One job of the matrix."""
    for made in ("build", "envs"):
        shutil.rmtree(checkout / made, ignore_errors=True)
    passed_on = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "KVCHECK_"))}
    began = time.monotonic()
    done = run_steps(
        workflow["jobs"]["engines"]["steps"],
        checkout,
        env={**passed_on, **_texts(workflow["env"]), "TORCH": TORCH, "ENGINE": engine, "RELEASE": release},
        programs=programs,
        limit_s=LIMIT_S,
    )
    left = results / f"{engine}-{release}"
    shutil.rmtree(left, ignore_errors=True)
    if (checkout / "build" / "kvcheck").exists():
        shutil.copytree(checkout / "build" / "kvcheck", left)
    write_text(left / "output.txt", done.output)
    return {
        "engine": engine,
        "release": release,
        "version": done.variables.strip().removeprefix("VERSION="),
        "exit_code": done.exit_code,
        "red_step": done.failed or "",
        "seconds": round(time.monotonic() - began),
    }


def _texts(values: object) -> dict[str, str]:
    assert isinstance(values, dict), "variables of a workflow are a table"
    return {str(name): str(value) for name, value in values.items()}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, subprocess.CalledProcessError) as error:
        _say(f"nightly: {error}")
        sys.exit(2)
