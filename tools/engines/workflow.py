"""A workflow of docs/ci run on this machine: what its steps install, the steps themselves, and what they leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rigs.ci_runner import Done, run_steps

from kvcheck.core.run.store import write_text

TORCH = "torch==2.13.0"
LIMIT_S = 3600.0


def runner(folder: Path) -> Path:
    """An environment for the steps, as a runner of CI has one. Returns the folder of its programs."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # A build of the same version would be taken as installed.
    uninstall = ["-m", "pip", "uninstall", "--quiet", "--yes", "kvcheck"]
    subprocess.run([str(folder / "bin" / "python"), *uninstall], check=True)
    return folder / "bin"


def run_job(
    steps: Sequence[Mapping[str, object]], checkout: Path, programs: Path, left: Path, variables: Mapping[str, str]
) -> tuple[Done, dict[str, object]]:
    """Run the steps in a checkout: what they gave, and its facts for a table. left: folder for what they leave."""
    shutil.rmtree(checkout / "build", ignore_errors=True)
    passed_on = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "KVCHECK_"))}
    began = time.monotonic()
    env = {**passed_on, **{name: str(value) for name, value in variables.items()}}
    done = run_steps(steps, checkout, env=env, programs=programs, limit_s=LIMIT_S)
    seconds = round(time.monotonic() - began)
    shutil.rmtree(left, ignore_errors=True)
    if (checkout / "build" / "kvcheck").exists():
        shutil.copytree(checkout / "build" / "kvcheck", left)
    write_text(left / "output.txt", done.output)
    return done, {"exit_code": done.exit_code, "red_step": done.failed or "", "seconds": seconds}
