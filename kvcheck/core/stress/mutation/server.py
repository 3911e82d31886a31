"""The server of trials: a process that has loaded torch and forks one process for each order on its input.

    order    {"number", "kind": "survey" or "judge", "texts": {file: text}, ...}
    answer   lines of the forked process, then {"number", "ended": status, "total_cpu_s", "stalled"}

Invariants:
- It forks before any thread runs in it, and one order at a time.
- A forked process imports kvcheck anew, so that every module that uses an edited one uses the edited one.
- One that uses up its CPU time, makes no progress or takes too much memory ends, and the answer tells them apart.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy
import torch

from kvcheck.core.base.child_start import PROCESS, tie_to
from kvcheck.core.stress.mutation.edits import package_folder, read_sources
from kvcheck.core.stress.mutation.imports import start_anew
from kvcheck.core.stress.mutation.reach import counted

PROGRAM = "kvcheck.core.stress.mutation.server"
TRIAL = "kvcheck.core.stress.mutation.trial"
LOADED = (numpy, torch)
"""What every trial needs and no edit changes. Loading it takes longer than most trials."""
MORE_MEMORY = 3 << 30
"""Bytes that a trial may take beyond what is mapped when it starts."""
LOOK_S = 5.0
STALLED_S = 90.0
"""A process that uses no CPU time for so long waits for what will not come."""
PROGRESS_S = 0.05
LINE_BYTES = 1 << 16


def main() -> int:
    """Serve orders until the input ends."""
    torch.set_num_threads(1)
    import kvcheck.core.stress.mutation.trial  # noqa: F401  # all that it imports is then read from disk once

    gc.collect()
    gc.freeze()
    for text in sys.stdin:
        order = json.loads(text)
        ending = serve(order, text)
        sys.stdout.write(json.dumps({"number": order["number"], **ending}) + "\n")
        sys.stdout.flush()
    return 0


def serve(order: dict[str, object], text: str) -> dict[str, object]:
    """Fork for one order and pass on what the forked process says. Returns how it ended."""
    number = order["number"]
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reading)
        _perform(order, writing, parent)
    os.close(writing)
    stalled = _pass_on(number, reading, child)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"ended": code, "total_cpu_s": round(used.ru_utime + used.ru_stime, 3), "stalled": stalled}


def _pass_on(number: object, reading: int, child: int) -> bool:
    """Pass lines on until the pipe ends. True if the process made no progress and was killed."""
    rest = b""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    before, since = 0.0, time.monotonic()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            if poll.poll(LOOK_S * 1000):
                more = pipe.read(LINE_BYTES)
                if not more:
                    return False
                *lines, rest = (rest + more).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    sys.stdout.write(json.dumps({"number": number, **said}) + "\n")
                sys.stdout.flush()
            now = _cpu_s(child)
            if now - before > PROGRESS_S:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > STALLED_S:
                os.kill(child, signal.SIGKILL)
                return True


def _cpu_s(process: int) -> float:
    """CPU seconds that a child has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _perform(order: dict[str, object], writing: int, parent: int) -> NoReturn:
    """What the forked process does. Its output and input are the null device, so that no edit can speak for it."""
    tie_to(parent, PROCESS)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(float(str(order["most_cpu_s"])))

    def say(values: dict[str, object]) -> None:
        left = (json.dumps(values) + "\n").encode()
        while left:
            left = left[os.write(writing, left) :]

    folder = package_folder()
    texts: dict[str, str] = order["texts"]  # type: ignore[assignment]
    if order["kind"] == "survey":
        start_anew(folder, {**read_sources(folder), **texts}, counted)
    else:
        start_anew(folder, texts)
    try:
        for file in texts:
            importlib.import_module(importlib.import_module("kvcheck.core.stress.mutation.edits").module_of(file))
        trial = importlib.import_module(TRIAL)
    except (Exception, SystemExit) as error:  # whatever the edited module raises while it is imported
        say({"outcome": "invalid", "message": f"{type(error).__name__}: {error}"})
        os._exit(0)
    try:
        if order["kind"] == "survey":
            trial.survey(order, say)
        else:
            trial.judge(order, say)
    except BaseException as error:  # the process ends here either way, and must not go on as a second server
        say({"outcome": "crash", "message": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _limit(most_cpu_s: float) -> None:
    """CPU time after which the kernel ends this process, for loops that no signal handler reaches; and memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(used.ru_utime + used.ru_stime + most_cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 5))
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_MEMORY, mapped + MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
