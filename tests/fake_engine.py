"""Environments with a stand-in for SGLang, and interpreters that are none, for tests of installed engines.

Invariants:
- An environment finds torch where this interpreter has it, and the stand-in; nothing is downloaded or copied.
"""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

FAKE = Path(__file__).parent / "fake_sglang"
HELLO = '{"hello": {"engine": "sglang", "version": "0", "python": "3", "torch": "2"}}'


def environment(folder: Path, fault: str | None) -> Path:
    """An environment with the stand-in and its fault; None: with no engine at all."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if fault is not None:
        paths |= {str(FAKE)}
        (site / "sglang_fault.py").write_text('"""Beside this file is the fault."""\n')
        put_fault(folder, fault)
    (site / "fake.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder


def put_fault(folder: Path, fault: str) -> None:
    """From now on the stand-in has this fault; "" for none."""
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "fault").write_text(fault)


def interpreter(folder: Path, script: str) -> Path:
    """A program that says what the script says, in the place of an interpreter."""
    file = folder / "bin" / "python"
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return folder
