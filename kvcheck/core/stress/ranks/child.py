"""Children: the process of a rank, as its supervisor holds it; started here, or wherever a launcher starts it.

Invariants:
- Whatever a rank had started ends with it, stopped or not.
- The end of a child's output is told once, as None, behind all that it said.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Protocol

from kvcheck.core.base.child import Streams, close_input, has_ended, kill_group, listen, start, tail, tell
from kvcheck.core.base.scratch import ScratchFolder
from kvcheck.core.stress.ranks.spec import RankSpec

TAIL = 600
"""Bytes of a dead rank's standard error that are shown."""

Put = Callable[[str, dict[str, object] | None], None]
"""Takes what a rank says, by its name; None: it says nothing more."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its code, negative for a signal, and the last it wrote to standard error."""

    code: int
    text: str


class Child(Protocol):
    """A rank's process."""

    order: RankSpec

    def tell(self, value: Mapping[str, object]) -> None:
        """A line for it; lost where it is dead."""

    def hush(self) -> None:
        """The end of its input, which is its own end."""

    def reap(self, within_s: float | None = None) -> Ending:
        """How it ended, in its own time or in this."""

    def forget(self) -> None:
        """Let go of it."""


class Launcher(Protocol):
    """Where ranks are started."""

    def start(self, order: RankSpec, put: Put) -> Child:
        """A process for the rank."""

    def meeting(self, name: str) -> str:
        """A place, of this name and of one run, where ranks of an end find one another."""

    def close(self) -> None:
        """The run is over."""


class LocalChild:
    """A child of this process."""

    def __init__(self, order: RankSpec, program: str, put: Put) -> None:
        self.order = order
        self._put = put
        self._reaping = threading.Lock()
        with contextlib.ExitStack() as on_failure:
            self._said: IO[str] = on_failure.enter_context(tempfile.TemporaryFile("w+"))
            self.process = start(program, streams=Streams(stdin=subprocess.PIPE, stderr=self._said))
            on_failure.pop_all()  # `forget` closes it
        tell(self.process, order.to_json())
        listen(self.process, self._take)

    def tell(self, value: Mapping[str, object]) -> None:
        """A line for it; lost where it is dead."""
        tell(self.process, json.dumps(value))

    def reap(self, within_s: float | None = None) -> Ending:
        """How it ended, in its own time or in this; whatever it had started is ended with it, stopped or not."""
        with self._reaping:
            has_ended(self.process, within_s)
            code = kill_group(self.process)
            return Ending(code, "" if self._said.closed else tail(self._said.fileno(), TAIL))

    def forget(self) -> None:
        """Close what this process holds of it."""
        self.hush()
        with self._reaping:
            self._said.close()

    def hush(self) -> None:
        """The end of its input."""
        close_input(self.process)

    def _take(self, line: str | None) -> None:
        with contextlib.suppress(ValueError):  # half a line of a process that was killed
            self._put(self.order.name, None if line is None else json.loads(line))


class LocalLauncher:
    """Starts ranks on this machine. host: the address that they are reached at. network: of their engines."""

    def __init__(self, program: str, *, host: str, network: str | None = None) -> None:
        self._program = program
        self._host = host
        self._network = network
        self._folder = ScratchFolder("ranks")

    def start(self, order: RankSpec, put: Put) -> LocalChild:
        """A child process."""
        return LocalChild(replace(order, host=self._host, network=self._network), self._program, put)

    def meeting(self, name: str) -> str:
        """A file."""
        return str(self._folder.path / name)

    def close(self) -> None:
        """The files are gone."""
        self._folder.close()
