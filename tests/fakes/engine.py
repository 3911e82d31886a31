"""Environments with stand-ins for engines, and interpreters that are none, for tests of installed engines."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

FAKES = sorted(str(each) for each in Path(__file__).parent.glob("[!_]*/"))
HELLO = (
    '{"hello": {"engine": "sglang", "version": "0", "python": "3", "torch": "2", "device": "cpu", '
    '"folder": null, "files": null, "commit": null, "absent": {}}}'
)

GREET = 'while [ "$1" != -u ]; do shift; done; printf "%s\\n" "$4" > "/proc/self/fd/$5"'
"""Says what a child of kvcheck says first, in a shell script that stands for the interpreter."""


def environment(folder: Path, fault: str | None) -> Path:
    """An environment with the stand-ins and their fault; None: with no engine at all."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if fault is not None:
        paths |= {*FAKES}
        (site / "sglang_fault.py").write_text('"""Beside this file is the fault."""\n')
        put_fault(folder, fault)
    (site / "fake.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder


def put_fault(folder: Path, fault: str) -> None:
    """From now on the stand-ins have this fault; "" for none."""
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "fault").write_text(fault)


def interpreter(folder: Path, script: str, greeting: str = GREET) -> Path:
    """A program that says what the script says, in the place of an interpreter."""
    file = folder / "bin" / "python"
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{greeting}\n{script}\n")
    file.chmod(0o755)
    return folder
