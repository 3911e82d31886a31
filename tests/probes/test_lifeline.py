"""The environment of an installed engine, and the child that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.engine import environment
from rigs.live_processes import is_alive, poll

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.names import Names

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


def test_what_cannot_be_imported_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "release"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lacking.py").write_text("import what_nobody_has\n")
    (package / "broken.py").write_text("raise ValueError('Invalid version: N/A')\n")
    (package / "confused.py").write_text("import os\nos.nope\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = Names(
        {
            "lacking": ("release.gone:x", "release.lacking:x"),
            "broken": ("release.broken:x", "release.gone:x"),
            "confused": ("release.confused:x",),
            "renamed": ("release:x", "release.gone.deeper:x", "json.decoder.deeper:x"),
        }
    )
    with pytest.raises(CannotDrive) as caught:
        names.require(("renamed", "broken", "lacking", "confused"))
    for told in (
        "broken cannot be imported: release.broken:x: ValueError: Invalid version: N/A",
        "lacking cannot be imported: release.lacking:x: ModuleNotFoundError",
        "confused cannot be imported: release.confused:x: AttributeError",
        "this release has no renamed (tried release:x: release has no x",
    ):
        assert told in str(caught.value)
    with pytest.raises(CannotDrive, match="broken cannot be imported"):
        names["broken"]
