"""Children: the process of a rank, as its supervisor holds it; started here, or wherever a launcher starts it.

Invariants:
- Whatever a rank had started ends with it, stopped or not.
- The end of a child's output is told once, as None, behind all that it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Protocol

from kvcheck.core.base.child import Streams, start
from kvcheck.core.base.scratch import ScratchFolder
from kvcheck.core.stress.ranks.spec import RankSpec

LOOK_S = 0.005
TAIL = 600
"""Characters of a dead rank's standard error that are shown."""

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
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(order.to_json() + "\n")
            self.process.stdin.flush()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def tell(self, value: Mapping[str, object]) -> None:
        """A line for it; lost where it is dead."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is dead or let go, and its end of output says so
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def reap(self, within_s: float | None = None) -> Ending:
        """How it ended, in its own time or in this; whatever it had started is ended with it, stopped or not."""
        with self._reaping:
            if self.process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._wait(within_s)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # its number is not free before it is waited for
            code = self.process.wait()
            if self._said.closed:
                return Ending(code, "")
            self._said.seek(0)
            return Ending(code, self._said.read()[-TAIL:].strip())

    def forget(self) -> None:
        """Close what this process holds of it."""
        self.hush()
        with self._reaping:
            self._said.close()

    def hush(self) -> None:
        """The end of its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _listen(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    self._put(self.order.name, json.loads(line))
        self._put(self.order.name, None)

    def _wait(self, within_s: float | None) -> None:
        """Wait for the end of the process and leave it to be waited for again. Raises TimeoutExpired."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.process.args, within_s or 0.0)
            time.sleep(LOOK_S)


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
