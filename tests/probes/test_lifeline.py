"""The child of an installed engine, while it imports, ends with a kvcheck that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.engine import environment
from rigs.live_processes import is_alive, poll

ROOT = Path(__file__).parents[2]
IMPORTS_S = 120.0
GONE_S = 2.0
SLOW = """
import os, subprocess, sys, time
helper = subprocess.Popen(["sleep", "600"])
with open({file!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{helper.pid}}")
os.rename({file!r} + ".new", {file!r})
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_killed_kvcheck_leaves_no_child_that_imports(is_stopped: bool, tmp_path: Path) -> None:
    env, told = environment(tmp_path / "env", None), tmp_path / "ids"
    (site,) = env.glob("lib/python*/site-packages")
    (site / "sglang.py").write_text(SLOW.format(file=str(told)), encoding="utf-8")
    command = [sys.executable, "-m", "kvcheck", "probe", f"sglang:{env}", "--out", str(tmp_path / "runs")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as parent:
        try:
            assert poll(told.exists, IMPORTS_S), "the child never began to import"
            ids = [int(text) for text in told.read_text().split()]
            assert len(ids) == 2 and all(map(is_alive, ids))
            for each in ids if is_stopped else ():
                os.kill(each, signal.SIGSTOP)
        finally:
            parent.kill()
    try:
        assert poll(lambda: not any(map(is_alive, ids)), GONE_S)
    finally:
        for each in filter(is_alive, ids):
            os.kill(each, signal.SIGKILL)
