"""Processes of kvcheck, forked from one that has loaded torch: loading it takes longer than most of what is tested.

Invariants:
- A forked process is a child of the test's own process, as a started one is: its number, its end, its signals and its
  death with its parent are the kernel's; what it runs is the command line that would have been started.
- It has not loaded kvcheck when it begins. What it does share with its like is where memory lies and the seed of
  hashes, so some tests of every kind start theirs: `processes(starts=True)`.
- A forked command forks its own children the same way, from a server below it.
- What a fork cannot give is started: another interpreter, flags, variables that are read while Python or torch loads.
- An environment of stand-ins for engines has this interpreter and this torch, so its processes are forked too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYTHON = sys.executable
SERVER = Path(__file__).with_name("fork_server.py")
SERVER_NAME = "fork server"
"""The name, as /proc gives it, of a forked command's server."""
CHILD_START = "/kvcheck/core/base/child_start.py"
PR_SET_CHILD_SUBREAPER = 36
LOADED_S = 120.0
READ_WHILE_LOADING = re.compile(r"(LD_|LC_|LANG|OMP_|MKL_|OPENBLAS_|TORCH_(?!NCCL_)|TRITON_|MALLOC_|GLIBC_|CUDA_)\w*")
READ_BY_PYTHON = re.compile(r"PYTHON(?!PATH|UNBUFFERED|DONTWRITEBYTECODE)\w+")
FLAGS = {"-I", "-u", "-B"}


class ForkingPopen(subprocess.Popen[Any]):
    """subprocess.Popen, which forks what can be forked."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        """The one step of Popen that makes the process; its parameters are those of CPython 3.11 to 3.14."""
        (_, pass_fds, folder, variables, _, _, shell, *pipes) = rest
        (stdin, _, _, stdout, _, stderr, _, *owner, umask, leads_group, group) = pipes
        is_plain = executable is None and preexec_fn is None and not shell and umask == -1 and group == -1
        environment = dict(os.environ if variables is None else variables)
        if not is_plain or any(each is not None for each in owner) or not can_fork(args, environment):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        standard = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        order = {
            "argv": [str(word) for word in args[1:]],
            "variables": environment,
            "folder": os.fspath(folder or os.getcwd()),
            "leads_group": bool(leads_group),
            "numbers": [0, 1, 2, *pass_fds],
            "interpreter": str(args[0]),
        }
        self.pid = _server().fork(json.dumps(order), [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


def can_fork(arguments: Any, variables: dict[str, str]) -> bool:
    """Whether a fork of the server would be what this command starts."""
    if isinstance(arguments, str | bytes | os.PathLike):
        return False
    if arguments[0] != PYTHON and not is_stand_in(Path(arguments[0])):
        return False
    words = list(map(str, arguments[1:]))
    if is_command(words):
        if any(map(READ_BY_PYTHON.fullmatch, variables)):
            return False
    else:
        at = next((at for at, word in enumerate(words) if word.endswith(CHILD_START)), None)
        if at is None or not set(words[:at]) <= FLAGS:
            return False
    return _read_while_loading(variables) == _server().loaded_with


def is_command(words: Any) -> bool:
    """Whether they run a module: `-m kvcheck`, say, or `-u -m kvcheck`."""
    return "-m" in words[:2] and words[0] in ("-m", "-u")


def is_stand_in(interpreter: Path) -> bool:
    """Whether it is this interpreter, in an environment made by `fakes.engine.environment`."""
    is_same = interpreter.is_symlink() and interpreter.resolve() == Path(PYTHON).resolve()
    return is_same and any(interpreter.parents[1].glob("lib/python*/site-packages/fake.pth"))


def _read_while_loading(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if READ_WHILE_LOADING.fullmatch(name)}


class _Server:
    def __init__(self, connected: socket.socket) -> None:
        self.loaded_with = _read_while_loading(dict(os.environ))
        self._turn = threading.Lock()
        self._socket = connected

    def fork(self, order: str, descriptors: list[int]) -> int:
        with self._turn, _adopting():
            socket.send_fds(self._socket, [order.encode()], descriptors)
            answer = self._socket.recv(64)
        if not answer:
            raise OSError("the process that forks has ended")
        return int(answer)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _server() -> _Server:
    """One a test worker."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(_started())
        return _SERVERS[0]


def _started() -> _Server:
    """A new server. Closing its socket ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [PYTHON, "-I", str(SERVER), str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    ours.settimeout(LOADED_S)
    assert ours.recv(16) == b"ready", "the process that forks has not loaded"

    def close() -> None:
        ours.close()
        process.wait(LOADED_S)

    atexit.register(close)
    return _Server(ours)


def use(connected: socket.socket) -> None:
    _SERVERS[:] = [_Server(connected)]


_LOCK = threading.Lock()
_SERVERS: list[_Server] = []
