"""The Dockerfile: what it names is in this tree, and the image it makes runs kvcheck where docker is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
DOCKER = shutil.which("docker")


def test_what_it_names_is_in_the_tree_and_it_does_not_run_as_root() -> None:
    (pinned,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"pip install --no-cache-dir {pinned} --index-url" in TEXT
    (libraries,) = re.findall(r"^MOONCAKE_LIBRARIES := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert all(name in TEXT for name in libraries.split())
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.M) for name in line.split()]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert TEXT.index("\nUSER user") < TEXT.index("\nENTRYPOINT")


@pytest.mark.processes
def test_the_image_runs_kvcheck() -> None:
    if DOCKER is None or subprocess.run([DOCKER, "version"], capture_output=True, check=False).returncode:
        pytest.skip("needs a docker whose daemon answers: docker version")
    subprocess.run([DOCKER, "build", "-q", "-t", "kvcheck-test", str(ROOT)], check=True)
    command = [DOCKER, "run", "--rm", "kvcheck-test", "stress", "retract-resume", "--shape", "llama-3-tiny"]
    done = subprocess.run([*command, "--schedules", "3", "--out", "/runs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " PASS  1 passed" in done.stdout, done.stdout + done.stderr
