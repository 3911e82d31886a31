"""Child: the supervisor's handle of a rank's process.

Invariants:
- Processes that a rank had started end with it, also stopped ones.
- The end of a child's output is reported once, as None, after all its lines.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import IO

from kvcheck.core.base.child import StandardStreams, close_input, has_ended, kill_group, listen, start, tail, tell
from kvcheck.core.stress.ranks.spec import RankSpec

TAIL = 600
"""Bytes of a dead rank's standard error that are shown."""

Put = Callable[[str, dict[str, object] | None], None]
"""Takes the name of a rank and a line of it; None: its output has ended."""


@dataclass(frozen=True, slots=True)
class Ending:
    """code: exit code, negative for a signal. text: the end of its standard error."""

    code: int
    text: str


class Child:
    def __init__(self, spec: RankSpec, program: str, put: Put) -> None:
        self.spec = spec
        self._put = put
        self._waiting = threading.Lock()
        with contextlib.ExitStack() as on_failure:
            self._said: IO[str] = on_failure.enter_context(tempfile.TemporaryFile("w+"))
            self.process = start(program, streams=StandardStreams(stdin=subprocess.PIPE, stderr=self._said))
            on_failure.pop_all()  # `close` closes it
        tell(self.process, spec.to_json())
        listen(self.process, self._take)

    def tell(self, value: Mapping[str, object]) -> None:
        """Write a line to its input. The line is lost if the process is dead."""
        tell(self.process, json.dumps(value))

    def wait(self, within_s: float | None = None) -> Ending:
        """Wait for its end, at most within_s seconds; then kill its process group."""
        with self._waiting:
            has_ended(self.process, within_s)
            code = kill_group(self.process)
            return Ending(code, "" if self._said.closed else tail(self._said.fileno(), TAIL))

    def close(self) -> None:
        self.close_input()
        with self._waiting:
            self._said.close()

    def close_input(self) -> None:
        close_input(self.process)

    def _take(self, line: str | None) -> None:
        with contextlib.suppress(ValueError):  # half a line of a process that was killed
            self._put(self.spec.name, None if line is None else json.loads(line))


class Inbox:
    def __init__(self) -> None:
        self.addresses: queue.Queue[dict[str, str]] = queue.Queue()
        self._over = Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def take(self, line: Mapping[str, object]) -> None:
        addresses = line.get("addresses")
        if isinstance(addresses, dict):
            self.addresses.put({str(name): str(address) for name, address in addresses.items()})
        if line.get("close"):
            self._over.set()
