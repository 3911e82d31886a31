"""What tests of compiled forms need: honest skips, and processes where triton interprets its kernels on the CPU."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from rigs.guards import COMPILED, HELD
from rigs.launches import LISTED, Launch, as_rows, from_rows, listed

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
from rigs.launches import as_rows, note_launches
assert digest_triton.IS_INTERPRETED, "triton does not interpret"
launches = set()
note_launches(launches)
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
        print(json.dumps([said.getvalue(), error, as_rows(launches)]), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(["", f"the check ended with status {status}", []]), flush=True)
"""


COUNTING = """
import importlib

def named(name):
    module, _, attribute = name.partition(":")
    return importlib.import_module(module), attribute

calls = []
for kernel in {kernels!r}:
    owner, attribute = named("kvcheck.kernels." + kernel)
    by_kernel = getattr(owner, attribute)
    setattr(owner, attribute, lambda *args, by_kernel=by_kernel: (calls.append(1), by_kernel(*args))[1])
for setting, value in {settings!r}.items():
    setattr(*named("kvcheck.kernels." + setting), value)
owner, attribute = named({check!r})
print(getattr(owner, attribute)(), len(calls))
"""


def interpreted_check(check: str, *kernels: str, settings: Mapping[str, int] | None = None) -> list[int]:
    """How much `check`, a "module:function" of the tests, compared, and how often it ran these kernels.

    kernels, settings: "module:name" in kvcheck.kernels. An exception in the check fails the test.
    """
    assert COMPILED in HELD, f"a test of interpreted kernels needs the marker {COMPILED}"
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    script = COUNTING.format(kernels=kernels, settings=dict(settings or {}), check=check)
    server.stdin.write(json.dumps(script) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process of interpreted kernels ended with {server.wait()}"
    said, error, launches = json.loads(answer)
    assert not error, error
    _check_listed(from_rows(launches))
    return [*map(int, said.split())]


def _check_listed(launches: set[Launch]) -> None:
    """Each class of launches is in the list; or, where LIST_LAUNCHES is set, it is added."""
    if "LIST_LAUNCHES" in os.environ:
        rows = as_rows(listed() | launches)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        LISTED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    missing = launches - listed()
    assert not missing, (
        f"{len(missing)} classes of launches are not compiled ahead of time, the first is {min(missing, key=repr)}; "
        "next: LIST_LAUNCHES=1 python -m pytest tests/kernels, and commit tests/kernels/launches.json"
    )


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
