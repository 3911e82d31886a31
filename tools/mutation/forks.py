"""Forks: runs orders, each in a process that is forked from this one and imports kvcheck anew, with some files edited.

    said by a forked process, a line of JSON each: {"at": the plan that begins}, and at last what came of the order

Invariants:
- No thread runs in this process when it forks, and it has loaded torch, which takes longer than most trials.
- A forked process that uses up its CPU time, makes no progress or takes too much memory ends; its answer has the
  reason.
- All forked processes end with this one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvcheck.core.base.child_start import PROCESS, tie_to
from tools.mutation.edits import PACKAGE, module_of
from tools.mutation.imports import start_anew

TRIAL = "tools.mutation.trial"
"""The module whose functions do the work of an order. It is imported anew too, since it uses what is edited."""
MORE_MEMORY = 3 << 30
"""Bytes that a process may take beyond what is mapped when it begins."""
LOOK_S = 5.0
STALLED_S = 90.0
"""A process that uses no CPU time for so long waits for something that will not come."""
PROGRESS_S = 0.05
LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The work of one process. about: anything of the caller's. work: a function of TRIAL, called with `say` and the
    arguments. texts: by file below the package's folder. most_cpu_s: after which the kernel ends the process."""

    about: object
    work: str
    arguments: Mapping[str, object]
    texts: Mapping[str, str] = field(default_factory=dict)
    most_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of one order. said: its last line. at: the last plan that began.

    ended: exit status, negative for a signal. stalled: it made no progress, and was killed.
    """

    said: Mapping[str, Any]
    at: str
    ended: int
    total_cpu_s: float
    stalled: bool


class Forks:
    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # the collector of a forked process would copy all that it shares with this one

    def answers(self, orders: Callable[[], Order | None]) -> Iterator[tuple[Order, Answer]]:
        """Run orders until there are none, and yield each with its answer when it has ended.

        orders: the next one; None: there is none now. It is called again after each answer.
        """
        under_way: dict[int, _Fork] = {}
        try:
            while True:
                while len(under_way) < self._jobs and (order := orders()) is not None:
                    fork = _Fork(order)
                    under_way[fork.reading] = fork
                if not under_way:
                    return
                ready, _, _ = select.select([*under_way], [], [], LOOK_S)
                for fork in [under_way[each] for each in ready]:
                    if not fork.read():
                        del under_way[fork.reading]
                        yield fork.order, fork.answer()
                for fork in under_way.values():
                    fork.end_if_stalled()
        finally:
            for fork in under_way.values():
                os.kill(fork.process, signal.SIGKILL)
                fork.answer()


class _Fork:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.reading, writing = os.pipe()
        parent = os.getpid()
        self.process = os.fork()
        if not self.process:
            os.close(self.reading)
            _perform(order, writing, parent)
        os.close(writing)
        self._rest = b""
        self._said: dict[str, Any] = {}
        self._at = ""
        self._cpu_s, self._since, self._looked = 0.0, time.monotonic(), time.monotonic()
        self._stalled = False

    def read(self) -> bool:
        """Read what is there. False at the end."""
        more = os.read(self.reading, LINE_BYTES)
        *lines, self._rest = (self._rest + more).split(b"\n")
        for line in lines:
            value = json.loads(line)
            if "at" in value:
                self._at = value["at"]
            else:
                self._said = value
        return bool(more)

    def answer(self) -> Answer:
        os.close(self.reading)
        _, status, used = os.wait4(self.process, 0)
        return Answer(
            said=self._said,
            at=self._at,
            ended=os.waitstatus_to_exitcode(status),
            total_cpu_s=round(used.ru_utime + used.ru_stime, 3),
            stalled=self._stalled,
        )

    def end_if_stalled(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        used = _cpu_s(self.process)
        if used - self._cpu_s > PROGRESS_S:
            self._cpu_s, self._since = used, now
        elif now - self._since > STALLED_S:
            self._stalled = True
            os.kill(self.process, signal.SIGKILL)


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _perform(order: Order, writing: int, parent: int) -> NoReturn:
    """The forked process. It ends here, whatever happens: it must not go on as a second parent."""
    try:
        tie_to(parent, PROCESS)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # no edit can answer for it
            os.dup2(null, number)
        _limit(order.most_cpu_s)
        _work(order, writing)
        os._exit(0)
    finally:
        os._exit(1)


def _work(order: Order, writing: int) -> None:
    def say(values: Mapping[str, object]) -> None:
        left = (json.dumps(values) + "\n").encode()
        while left:
            left = left[os.write(writing, left) :]

    try:
        start_anew(PACKAGE, order.texts, TRIAL)
        for file in order.texts:
            importlib.import_module(module_of(file))
        work = getattr(importlib.import_module(TRIAL), order.work)
    except (Exception, SystemExit) as error:  # whatever the edited module raises while it is imported
        say({"outcome": "invalid", "message": f"{type(error).__name__}: {error}"})
        return
    try:
        work(say, **order.arguments)
    except BaseException as error:  # whatever the edited module raises outside a schedule
        say({"outcome": "crash", "message": f"{type(error).__name__}: {error}"})


def _limit(most_cpu_s: float) -> None:
    """CPU time after which the kernel ends this process, for loops that no signal handler interrupts; and memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(used.ru_utime + used.ru_stime + most_cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 5))
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_MEMORY, mapped + MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
