"""The first lines that a child process runs, before it imports anything of kvcheck.

    python -I -u child_start.py PROGRAM BUILD HELLO PARENT TIE PATHS [ARGUMENTS...]

    PROGRAM  module to run as __main__
    BUILD    the kvcheck to import: {"package": folder, "version": ..., "python": ...}
    HELLO    file descriptor for the report
    PARENT   process id
    TIE      "process" or "group"
    PATHS    sys.path of the child, a list; null: the interpreter's own

Invariants:
- Interpreters too old for kvcheck can run this file, to report their version.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import threading

OLDEST_PYTHON = (3, 11)
PROCESS, GROUP = "process", "group"
PR_SET_PDEATHSIG = 1


def main() -> None:
    program, build, hello, parent, tie, paths, *arguments = sys.argv[1:]
    tie_to(int(parent), tie)
    if sys.version_info < OLDEST_PYTHON:
        needed, found = ".".join(map(str, OLDEST_PYTHON)), sys.version.split()[0]
        sys.exit(f"kvcheck needs Python {needed} or newer in the engine's environment, which has {found}")
    places = json.loads(paths)
    if places is not None:
        sys.path[:] = places
    report = load_package(json.loads(build)["package"])
    with os.fdopen(int(hello), "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(report) + "\n")
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def tie_to(parent: int, tie: str) -> None:
    """End this process with its parent; GROUP: also its group, which it has to lead.

    When the parent ends, the kernel sends SIGKILL, which ends a stopped process too; or, for a group, SIGCONT, so that
    a thread sees the end of standard input and kills the group.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_PDEATHSIG, signal.SIGCONT if tie == GROUP else signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"this process cannot be tied to its parent: {os.strerror(ctypes.get_errno())}")
    if tie == GROUP:
        poll = select.poll()
        poll.register(sys.stdin.fileno(), 0)  # wake at the end of the input, not for data in it

        def watch() -> None:
            poll.poll()
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the signal was requested
        os.kill(os.getpid(), signal.SIGKILL)


def load_package(folder: str) -> dict[str, str]:
    spec = importlib.util.spec_from_file_location(
        "kvcheck", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        sys.exit(f"no kvcheck can be imported from {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["kvcheck"] = package
    spec.loader.exec_module(package)
    return {
        "package": os.path.dirname(str(package.__file__)),
        "version": str(package.__version__),
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    main()
