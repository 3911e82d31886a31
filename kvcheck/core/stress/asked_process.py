"""AskedProcess: a worker process on a device that answers questions in lines of JSON, restarted after a lost context.

Invariants:
- A question is never repeated, also if its process died.
"""

from __future__ import annotations

import json
import queue
import subprocess
import time
from collections.abc import Callable

from kvcheck.core.base.child import Streams, close_input, end, listen, start, tell
from kvcheck.core.base.errors import InternalError, UnknownVerdict, UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.stress.cell_workers import BEGUN, ENDING_S, LATE_S


class Unanswered(Exception):
    """died: the status in words; None for a timeout."""

    def __init__(self, died: str | None) -> None:
        super().__init__(died or "its time was over")
        self.died = died


class AskedProcess:
    """A question starts the worker, again after `close`."""

    def __init__(self, program: str, kind: str) -> None:
        self._program, self._kind = program, kind
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._has_begun = False

    def ask(
        self, question: object, *, until: float | None = None, told: Callable[[object], None] = lambda row: None
    ) -> object:
        """Send a question and return the answer. until: the process's time.monotonic() limit. told: called with each
        row before the answer. Raises Unanswered; the error of the process; and UnknownVerdict if it never began."""
        process = self._process = self._process or self._start()
        tell(process, json.dumps(to_plain(question)))
        while True:
            try:
                line = self._lines.get(timeout=None if until is None else max(0.0, until + LATE_S - time.monotonic()))
            except queue.Empty:
                raise Unanswered(None) from None
            if line is None:
                raise Unanswered(self._death(process))
            if line.strip() == BEGUN:
                self._has_begun = True
                continue
            said = json.loads(line)
            if said.get("error") is not None:
                kind = {2: UsageError, 4: UnknownVerdict}.get(said["exit_code"], InternalError)
                raise kind(str(said["error"]))
            if said.keys() == {"told"}:
                told(said["told"])
                continue
            return said

    def close(self) -> None:
        if self._process is not None:
            end(self._process, within_s=ENDING_S)
            close_input(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._lines, self._has_begun = queue.SimpleQueue(), False
        streams = Streams(stdin=subprocess.PIPE)
        process = start(self._program, self._kind, streams=streams, variables={"OMP_NUM_THREADS": "1"})
        listen(process, self._lines.put)
        return process

    def _death(self, process: subprocess.Popen[str]) -> str:
        why = f"the process that judged it ended with status {process.wait()}"
        if not self._has_begun:
            raise UnknownVerdict(f"{why} while kvcheck was loaded, before it was asked anything")
        return why
