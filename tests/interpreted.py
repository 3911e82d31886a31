"""What tests of compiled forms need: honest skips, and a process where triton interprets its kernels on the CPU.

Invariants:
- The kernels ran interpreted, or the check fails: triton decides that when it is imported, once for a process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install 'kvcheck[triton]'"
)
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba: pip install 'kvcheck[fast]'"
)
PREAMBLE = """
import triton
from kvcheck.kernels import digest_triton
assert digest_triton.IS_INTERPRETED
"""


def interpreted_check(script: str) -> list[str]:
    """What `script` printed, in words; an exception in it fails the test."""
    tests = Path(__file__).parent
    paths = [str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + textwrap.dedent(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()
