"""Commands of this checkout, run in a folder, and the end of a program that runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def kvcheck(folder: Path, *arguments: str, is_shown: bool = False) -> subprocess.CompletedProcess[str]:
    """The exit code of a command, and what it printed. is_shown: on the terminal instead."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(path for path in (str(PROJECT), os.environ.get("PYTHONPATH", "")) if path)
    command = [sys.executable, "-m", "kvcheck", *arguments]
    environment, stdout = {**os.environ, "PYTHONPATH": paths}, None if is_shown else subprocess.PIPE
    return subprocess.run(command, cwd=folder, env=environment, stdout=stdout, text=True, check=False)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def end(name: str, main: Callable[[Sequence[str]], int], *failures: type[Exception]) -> int:
    """The exit code of a program: 130 where it was interrupted, 2 where a step before its results failed."""
    failed: tuple[type[Exception], ...] = (OSError, subprocess.CalledProcessError, *failures)
    try:
        return main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    except failed as error:
        say(f"{name}: {error}")
        return 2
