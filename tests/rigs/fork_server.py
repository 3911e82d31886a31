"""The process that tests fork kvcheck's processes from: it has loaded torch and its like, and nothing of kvcheck.

    python -I fork_server.py SOCKET CLIENT

One message a process: JSON {"argv", "variables", "folder", "leads_group", "numbers", "interpreter"}, with the
descriptors that are to have these numbers. The answer is its process id.

Invariants:
- A forked process is a child of the client, not of this one: its parent here ends, and the client adopts it.
- It runs what its command line names, from the first line on: kvcheck's own start of children, or `-m MODULE`.
- A forked command has a server of its own, forked before it runs, since only a process below it can give it children.
  It holds none of the command's descriptors, ends with it, and is named SERVER_NAME for tests that count processes.
- A forked command ends with its client; kvcheck's own children tie themselves, and nothing is done for them here.
- There is one thread when it is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import runpy
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import torch.distributed
import typer

# A limit that the first test to fork has set is not everybody's: it would cut the bytecode written below.
LARGEST_FILE = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
sys.path.insert(0, str(Path(__file__).parent))
import forked  # noqa: E402  (with that limit taken away)

del sys.path[0]

LOADED = (numpy, torch, torch.distributed, typer)
MESSAGE_BYTES = 1 << 20
MOST_DESCRIPTORS = 16
BEYOND = 256
"""Received descriptors are moved up here before they are put where the process expects them."""
ADOPTION_S = 10.0
FLUSH_FAILED = 120
"""How Python ends where standard output cannot be written."""
PR_SET_PDEATHSIG = 1
OWN_NAME = Path("/proc/self/comm")
NAME = OWN_NAME.read_text()


def serve(server: socket.socket, client: int) -> dict[str, object]:
    """Fork until the client is gone. Returns in the forked process, with what it has to run."""
    while True:
        text, received, _, _ = socket.recv_fds(server, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not text:
            os._exit(0)
        assert os.listdir("/proc/self/task") == [str(os.getpid())], "a thread would not be in the forked process"
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for descriptor in received:
                os.close(descriptor)
            continue
        if os.fork():
            os._exit(0)
        order: dict[str, object] = json.loads(text)
        _become(order, received, server, client)
        return order


def _become(order: dict[str, object], received: list[int], server: socket.socket, client: int) -> None:
    """Make this process what a started one would be: its parent, group, folder, variables and descriptors."""
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != client:
        assert time.monotonic() < deadline, "the client has not adopted this process"
        time.sleep(0.0002)
    OWN_NAME.write_text(NAME)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if order["leads_group"]:
        os.setsid()
    os.chdir(str(order["folder"]))
    os.environ.clear()
    os.environ.update(order["variables"])  # type: ignore[call-overload]
    server.send(str(os.getpid()).encode())
    server.close()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, BEYOND) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(high, order["numbers"], strict=True):  # type: ignore[call-overload]
        os.dup2(descriptor, number)
        os.close(descriptor)


def _end_with(parent: int) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:
        os._exit(1)


def serve_command() -> dict[str, object] | None:
    """Fork a server for this command's own children. Returns None in the command, and in a child what it has to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = os.getpid()
    if os.fork():
        theirs.close()
        high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, BEYOND)  # the low numbers are the command's
        ours.close()
        forked.use(socket.socket(fileno=high))
        subprocess.Popen = forked.ForkingPopen  # type: ignore[misc]
        return None
    OWN_NAME.write_text(forked.SERVER_NAME)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the command's group: what it does of them is its own
        signal.signal(number, signal.SIG_IGN)
    _end_with(command)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != theirs.fileno():
            with contextlib.suppress(OSError):  # the list's own descriptor
                os.close(int(name))
    return serve(theirs, command)


def enter(interpreter: Path) -> None:
    """Be the interpreter of its environment: what is installed there can be imported."""
    if str(interpreter) == sys.executable:
        return
    sys.executable = str(interpreter)
    sys.prefix = sys.exec_prefix = str(interpreter.parents[1])
    for folder in interpreter.parents[1].glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))


def open_streams(*, is_unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding="utf-8",
            errors=errors,
            write_through=is_unbuffered,
            line_buffering=not is_unbuffered and (name == "stderr" or os.isatty(number)),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    number, client = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the client, and this process with it
    gc.collect()
    gc.freeze()
    server = socket.socket(fileno=number)
    server.send(b"ready")
    order = serve(server, client)
    while forked.is_command(order["argv"]):
        _end_with(client)
        client = os.getpid()
        if (below := serve_command()) is None:
            break
        order = below
    enter(Path(str(order["interpreter"])))
    try:
        run(list(map(str, order["argv"])), str(order["folder"]))  # type: ignore[call-overload]
        code: object = None
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    is_written = _finish()
    os._exit((code or 0) & 0xFF if is_written else FLUSH_FAILED)


def _finish() -> bool:
    """What Python does at its end, but take modules apart, which would copy all that they share with the server.

    Returns whether standard output could be written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
    return True


def run(argv: list[str], folder: str) -> None:
    """argv: as of `python -I ... -u FILE ARGUMENTS...`, or of `python [-u] -m MODULE ARGUMENTS...`."""
    if forked.is_command(argv):
        at = argv.index("-m")
        open_streams(is_unbuffered=at > 0 or bool(os.environ.get("PYTHONUNBUFFERED")))
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder, *filter(None, searched)]
        sys.argv[:] = argv[at + 1 :]
        runpy.run_module(argv[at + 1], run_name="__main__", alter_sys=True)
        return
    open_streams(is_unbuffered=True)
    sys.dont_write_bytecode = "-B" in argv[: argv.index("-u")]
    sys.argv[:] = argv[argv.index("-u") + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
