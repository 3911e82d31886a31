"""AskedProcess: a process on a device that answers each question with one line, and a new one behind a lost context.

Invariants:
- Questions and answers are lines of JSON. Nothing is unpickled.
- A question is asked once. Where its process died, nobody has answered it.
"""

from __future__ import annotations

import json
import queue
import subprocess
import time
from collections.abc import Callable

from kvcheck.core.base.child import Streams, close_input, end, listen, start, tell
from kvcheck.core.base.errors import InternalError, KvcheckError, UnknownVerdict, UsageError
from kvcheck.core.base.record import to_plain
from kvcheck.core.stress.cell_workers import BEGUN, ENDING_S, LATE_S


class Unanswered(Exception):
    """The process has ended, or its time has. died: with which status, in words; None where its time was over."""

    def __init__(self, died: str | None) -> None:
        super().__init__(died or "its time was over")
        self.died = died


class AskedProcess:
    """A process that runs a worker with this argument. A question starts it, and starts it again once it is closed."""

    def __init__(self, program: str, kind: str) -> None:
        self._program, self._kind = program, kind
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.has_begun = False

    def ask(
        self, question: object, *, until: float | None = None, told: Callable[[object], None] = lambda row: None
    ) -> dict[str, object]:
        """The answer to a question. Arguments and errors are those of `answer`."""
        self.begin(question)
        return self.answer(until=until, told=told)

    def begin(self, question: object) -> None:
        """Ask a question, of a new process where none runs."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        self._process = self._process or self._start()
        tell(self._process, json.dumps(to_plain(question)))

    def answer(
        self, *, until: float | None = None, told: Callable[[object], None] = lambda row: None
    ) -> dict[str, object]:
        """The answer. until: the time.monotonic() at which the process keeps to end. told: called with each row that
        comes before the answer. Raises Unanswered; what the process says that it failed with; and UnknownVerdict if it
        never began."""
        process = self._process
        while process is not None:
            try:
                line = self._lines.get(timeout=None if until is None else max(0.0, until + LATE_S - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                raise Unanswered(self._death(process))
            if line.strip() == BEGUN:
                self.has_begun = True
                continue
            said = answer_of(line)
            if said.keys() == {"told"}:
                told(said["told"])
                continue
            return said
        raise Unanswered(None)

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            end(self._process, within_s=ENDING_S)
            close_input(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._lines, self.has_begun = queue.SimpleQueue(), False
        streams = Streams(stdin=subprocess.PIPE)
        process = start(self._program, self._kind, streams=streams, variables={"OMP_NUM_THREADS": "1"})
        listen(process, self._lines.put)
        return process

    def _death(self, process: subprocess.Popen[str]) -> str:
        why = f"the process that judged it ended with status {process.wait()}"
        if not self.has_begun:
            raise UnknownVerdict(f"{why} while kvcheck was loaded, before it was asked anything")
        return why


def answer_of(line: str) -> dict[str, object]:
    """The row in a line of a worker. Raises the error that a worker's last line holds."""
    row: dict[str, object] = json.loads(line)
    if row.get("error") is not None:
        kinds: dict[object, type[KvcheckError]] = {2: UsageError, 4: UnknownVerdict}
        raise kinds.get(row["exit_code"], InternalError)(str(row["error"]))
    return row
