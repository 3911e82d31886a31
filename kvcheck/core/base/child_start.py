"""Start of a child: the first lines that a process of kvcheck runs, before it imports anything of kvcheck.

    python -I -u child_start.py PROGRAM BUILD HELLO PARENT TIE PATHS [ARGUMENTS...]

    PROGRAM  module to run as __main__     BUILD  which kvcheck: {"package": folder, "version": ..., "python": ...}
    HELLO    descriptor to say it on       PARENT process id       TIE  process or group
    PATHS    where to import from besides, a list; null: where the interpreter itself looks

Invariants:
- kvcheck is found by its folder alone, and nothing is imported from the current folder.
- The process ends with its parent, stopped or not, whatever its main thread is at.
- The file can be read by older interpreters than kvcheck needs, so that it can say so.
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
    """Tie this process to its parent, say which kvcheck it is, and run the program."""
    program, build, hello, parent, tie, paths, *arguments = sys.argv[1:]
    tie_to(int(parent), tie)
    if sys.version_info < OLDEST_PYTHON:
        needed, found = ".".join(map(str, OLDEST_PYTHON)), sys.version.split()[0]
        sys.exit(f"kvcheck needs Python {needed} or newer in the engine's environment, which has {found}")
    places = json.loads(paths)
    if places is not None:
        sys.path[:] = places
    say_hello(int(hello), load_package(json.loads(build)["package"]))
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def tie_to(parent: int, tie: str) -> None:
    """End this process with its parent. GROUP: and all that it has started, which has to be in its own group.

    The kernel sends a signal when the parent ends: SIGKILL, which ends a stopped process too; or, for a group, SIGCONT,
    so that a thread sees the end of standard input and kills the whole group.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_PDEATHSIG, signal.SIGCONT if tie == GROUP else signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"this process cannot be tied to its parent: {os.strerror(ctypes.get_errno())}")
    if tie == GROUP:
        poll = select.poll()
        poll.register(sys.stdin.fileno(), 0)  # what is still to be read does not count, its end does

        def watch() -> None:
            poll.poll()
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # it was gone before the signal was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def load_package(folder: str) -> dict[str, str]:
    """Import kvcheck from its folder; returns what was found there."""
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


def say_hello(descriptor: int, build: dict[str, str]) -> None:
    """One line for the parent."""
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(build) + "\n")


if __name__ == "__main__":
    main()
