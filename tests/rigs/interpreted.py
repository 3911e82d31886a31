"""What tests of compiled forms need: honest skips, and processes where triton interprets its kernels on the CPU.

Invariants:
- The kernels ran interpreted, or the check fails: triton decides that when it is imported, once for a process.
- Checks do not see each other: each runs in a fork of a process that has loaded the libraries and nothing else.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
from rigs.guards import COMPILED, HELD

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install 'kvcheck[triton]'"
)
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba: pip install 'kvcheck[fast]'"
)
LIMIT_S = 300
SERVER = """
import contextlib, io, json, os, signal, sys, traceback, warnings
import torch, triton
from kvcheck.kernels import digest_triton
assert digest_triton.IS_INTERPRETED, "triton does not interpret"
warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)  # idle threads of a BLAS
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.alarm(int(sys.argv[1]))
        said, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(said):
                exec(compile(json.loads(line), "check", "exec"), {})
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([said.getvalue(), error]), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(["", f"the check ended with status {status}"]), flush=True)
"""


def interpreted_check(script: str) -> list[str]:
    """What `script` printed, in words; an exception in it fails the test."""
    assert COMPILED in HELD, f"a test of interpreted kernels needs the marker {COMPILED}"
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(textwrap.dedent(script)) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process of interpreted kernels ended with {server.wait()}"
    said, error = json.loads(answer)
    assert not error, error
    return str(said).split()


@cache
def _server() -> subprocess.Popen[str]:
    """One process a test worker: loading torch and triton takes longer than most checks."""
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER, str(LIMIT_S)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """End of input ends the process."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.wait(LIMIT_S)
    server.stdout.close()
