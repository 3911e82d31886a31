"""NVIDIA's compute-sanitizer: where it is, whether it works here, and a command run under it.

Invariants:
- It judges only where one small tensor passes under it: some machines refuse it, and then everything would fail.
- Its own exit code tells what it found from what the command found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcheck.commands.terminal import say
from kvcheck.core.base.errors import TargetError, UnknownVerdict, UsageError
from kvcheck.core.bench.gpu_jobs import SANITIZER, SANITIZER_FOUND

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
UNDER = "--under"
TOUCH = "import torch; torch.ones(8, device='cuda').sum().item()"
PROBE_S = 60
"""What a sanitizer is tried on before it judges, and for how long."""
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Every tensor is then an allocation that the tool knows."""


def sanitizer_path() -> str | None:
    """Where the sanitizer is: on PATH, or in the toolkit that the usual variable names."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    beside = os.pathsep.join(str(home / folder) for home in homes for folder in ("bin", "compute-sanitizer"))
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=beside)


def under(path: str, tool: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command under a tool."""
    return [path, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), *command]


def tool_of(text: str) -> str:
    """The tool that "compute-sanitizer" or "compute-sanitizer:TOOL" names. Raises UsageError."""
    name, _, tool = text.partition(":")
    if name != SANITIZER or (tool or TOOLS[0]) not in TOOLS:
        known = ", ".join(f"{SANITIZER}:{each}" for each in TOOLS)
        raise UsageError(f"{UNDER}: expected {SANITIZER} or one of {known}, got {text!r}")
    return tool or TOOLS[0]


def run_under(argv: Sequence[str], text: str, run: Callable[..., subprocess.CompletedProcess[bytes]]) -> int:
    """Run this command again under a tool, without --under; the exit code. argv: the words behind "kvcheck".

    Raises UnknownVerdict where the tool is missing, or does not work on this machine.
    """
    tool, path = tool_of(text), sanitizer_path()
    if path is None:
        raise UnknownVerdict(f"{UNDER} {text}: {SANITIZER} is neither on PATH nor in a CUDA toolkit")
    try:
        code = run(under(path, tool, (sys.executable, "-c", TOUCH)), capture_output=True, timeout=PROBE_S).returncode
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        ended = f"took more than {PROBE_S} s" if code is None else f"ended with {code}"
        raise UnknownVerdict(f"{UNDER} {text}: it does not work on this machine: one small tensor {ended}")
    command = (sys.executable, "-P", "-m", "kvcheck", *_without(argv))
    code = run(under(path, tool, command), env={**os.environ, **UNCACHED}).returncode
    if code != SANITIZER_FOUND:
        return code
    say(f" FAIL  {tool} found errors; they stand above")
    return TargetError.exit_code


def _without(argv: Sequence[str]) -> list[str]:
    """The words but for --under and its value."""
    left, words = [], iter(argv)
    for word in words:
        if word == UNDER:
            next(words, None)
        elif not word.startswith(f"{UNDER}="):
            left.append(word)
    return left
