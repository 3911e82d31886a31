"""Runs batches as tasks of Ray, on this machine or on a cluster.

Invariants:
- This is the only module that imports ray.
- Tasks and answers are lines of JSON: nothing of kvcheck is pickled. Results of another kvcheck are refused.
- Ray restarts no task. A batch whose worker or node is gone comes back as lost.
- A cluster that kvcheck started ends with it; a joined one stays.
"""

from __future__ import annotations

import importlib
import json
import re
import signal
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any, TextIO, cast

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.run.workers import LATE_S
from kvcheck.core.stress.seeds.batches import BatchTask, result_of
from kvcheck.core.stress.seeds.crew import Ended

LOCAL = "local"
ADDRESS = re.compile(r"(ray://)?(?P<host>[^/]+):(?P<port>\d+)")
CONNECT_S = 5.0
INSTALL = "pip install 'kvcheck[ray]'"
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""Variables of Ray that have to be set before it is imported: it reports nothing to anybody, and warns of nothing."""


def load_ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UnknownVerdict(f"--ray needs Ray, which cannot be imported: {error}; next: {INSTALL}") from error


class RayCrew:
    """address: "local", or that of a cluster. places: batches at once; None: the CPUs of the cluster. Raises UsageError
    if the cluster cannot be reached."""

    def __init__(self, address: str, *, places: int | None, worker: str, ray: ModuleType | None = None) -> None:
        self._ray: Any = ray or load_ray()
        self._under_way: dict[Any, BatchTask] = {}
        is_local = address == LOCAL
        own = {"num_cpus": places, "include_dashboard": False} if is_local else {}
        self._stdout = sys.stdout
        sys.stdout = cast(TextIO, _OfOneThread(sys.stdout))
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            if (named := ADDRESS.fullmatch(address)) is not None:  # Ray would look for a dead one for minutes
                socket.create_connection((named["host"], int(named["port"])), timeout=CONNECT_S).close()
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="kvcheck", **own)
        except (ValueError, RuntimeError, OSError, OverflowError) as error:
            sys.stdout = self._stdout
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"--ray {address}: no cluster answers there: {first}; expected local, auto, HOST:PORT or ray://HOST:PORT"
            ) from error
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own there, which leaves at once
        self.places = places or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(run_in_task)
        self._worker = worker

    def begin(self, task: BatchTask) -> None:
        self._under_way[self._task.remote(self._worker, json.dumps(to_plain(task)))] = task

    def take(self, until: float | None) -> Ended | None:
        timeout_s = None if until is None else max(0.0, until + LATE_S - time.monotonic())
        ready, _ = self._ray.wait([*self._under_way], num_returns=1, timeout=timeout_s)
        if not ready:
            return None
        task = self._under_way.pop(ready[0])
        try:
            return Ended(task=task, result=result_of(self._ray.get(ready[0])))
        except self._ray.exceptions.RayTaskError as error:
            last = str(error).strip().rpartition("\n")[2]
            raise UnknownVerdict(
                f"a task of Ray failed: {last}; expected this kvcheck and what it needs on every node"
            ) from error
        except self._ray.exceptions.RayError as error:
            first = next(iter(str(error).strip().splitlines()), "")
            return Ended(task=task, lost=f"{type(error).__name__}: {first}", ran=task.line)

    def close(self) -> None:
        for running in self._under_way:
            self._ray.cancel(running, force=True)
        self._ray.shutdown()
        sys.stdout = self._stdout


class _OfOneThread:
    """A stream for the thread that makes it. Output of other threads goes to stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._owner = threading.get_ident()

    def write(self, text: str) -> int:
        return (self._stream if threading.get_ident() == self._owner else sys.stderr).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_in_task(worker: str, text: str) -> str:
    line: str = importlib.import_module(worker).ran(text)
    return line
