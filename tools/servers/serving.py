"""Servers of engines: started in a process group of their own, waited for, measured, and stopped as a whole.

    with serving([Command(...)], folder=Path("build/servers"), within_s=300) as (server,):
        ask(server.address)

Invariants:
- A server listens on 127.0.0.1 alone, by the command that its engine's table gives; what it says goes to its log.
- It inherits what docs/children.md names for an engine, and never a secret.
- Nothing of a server is left: not after an exception, not after Ctrl-C, and not when this process is killed.
- A server that ends by itself is an error with the end of its log.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcheck.core.base.child import close_input, has_ended, inherited, kill_group, tail
from kvcheck.core.base.errors import UnknownVerdict, UsageError

LOCAL = "127.0.0.1"
LAUNCHER = Path(__file__).with_name("launcher.py")
LOOK_S = 0.2
ANSWER_S = 5.0
STOP_S = 20.0
TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a server is started. words: the command line. variables: its environment, besides what it inherits.
    health: the path that answers 200 once the server can be asked.
    """

    name: str
    words: tuple[str, ...]
    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"

    def __post_init__(self) -> None:
        if not self.words or not 0 < self.port < 1 << 16 or "/" in self.name:
            raise UsageError(f"a server has a command, a port and a plain name; got {self}")


@contextlib.contextmanager
def serving(commands: Sequence[Command], *, folder: Path, within_s: float) -> Iterator[tuple[Server, ...]]:
    """Start all of them, wait until each answers, and stop them at the end. Logs: folder/NAME.log.

    Raises UnknownVerdict where one ends, or does not answer in time.
    """
    with contextlib.ExitStack() as stop:
        servers: list[Server] = []
        for command in commands:
            servers.append(Server(command, folder / f"{command.name}.log"))
            stop.callback(servers[-1].stop)
        until = time.monotonic() + within_s
        for server in servers:
            server.wait(until - time.monotonic())
        yield tuple(servers)


def free_ports(count: int) -> tuple[int, ...]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCAL, 0))
        return tuple(int(each.getsockname()[1]) for each in sockets)


class Server:
    """A server that has been started. log: where all that its processes say is written."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self._cpu_s: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(LAUNCHER), str(os.getpid()), *command.words],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited(os.environ, is_engine=True), **command.variables},
                start_new_session=True,
                text=True,
            )

    @property
    def address(self) -> str:
        return f"http://{LOCAL}:{self.command.port}"

    @property
    def group(self) -> int:
        return self._process.pid

    def wait(self, within_s: float) -> None:
        """Raises UnknownVerdict where it ends, or does not answer in time."""
        until = time.monotonic() + within_s
        while not self.answers():
            if has_ended(self._process, 0.0):
                raise UnknownVerdict(f"{self.command.name} ended before it answered; {self.said()}")
            if time.monotonic() > until:
                raise UnknownVerdict(
                    f"{self.command.name} did not answer {self.command.health} within {within_s:.0f} s; {self.said()}"
                )
            time.sleep(LOOK_S)

    def answers(self) -> bool:
        connection = http.client.HTTPConnection(LOCAL, self.command.port, timeout=ANSWER_S)
        try:
            connection.request("GET", self.command.health)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """CPU seconds, user and system, of all its processes since its start; after `stop`: until it was stopped."""
        if self._cpu_s is not None:
            return self._cpu_s
        return sum(session_ticks(self.group).values()) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL for what is left of it after STOP_S. Does nothing the second time."""
        if self._cpu_s is not None:
            return
        self._cpu_s = self.cpu_s()
        try:
            if not has_ended(self._process, 0.0):
                os.killpg(self.group, signal.SIGTERM)
                has_ended(self._process, STOP_S)
        finally:  # also when interrupted
            for pid in session_ticks(self.group):  # a process that left the group is still in the session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kill_group(self._process)
            close_input(self._process)

    def said(self) -> str:
        """Its log, and how that ends: for a message."""
        with self.log.open("rb") as stream:
            return f"its log {self.log} ends:\n{tail(stream.fileno(), TAIL_BYTES)}"


def session_ticks(session: int) -> dict[int, int]:
    """Clock ticks that each live process of a session has used, with its children that have ended."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found[int(path.parent.name)] = sum(map(int, fields[11:15]))
    return found
