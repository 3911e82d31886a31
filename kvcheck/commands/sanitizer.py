"""NVIDIA's compute-sanitizer: where it is, whether it works here, and a command run under it.

Invariants:
- It judges only where one small tensor passes under it: some machines refuse it, and then everything would fail.
- Its own exit code tells what it found from what the command found.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvcheck.core.bench.gpu_jobs import SANITIZER, SANITIZER_FOUND

TOUCH = "import torch; torch.ones(8, device='cuda').sum().item()"
PROBE_S = 60
"""What a sanitizer is tried on before it judges, and for how long."""


def sanitizer_path() -> str | None:
    """Where the sanitizer is: on PATH, or in the toolkit that the usual variable names."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    beside = os.pathsep.join(str(home / folder) for home in homes for folder in ("bin", "compute-sanitizer"))
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=beside)


def under(path: str, tool: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command under a tool."""
    return [path, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), *command]
