"""Agents: the judge's end of the processes with the library. All of them end with the judge, also stopped ones."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcheck.core.base.child import StandardStreams, close_input, has_ended, listen, start, tell
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake import agent
from kvcheck.core.probes.mooncake.lanes import CallLane, Result
from kvcheck.core.probes.mooncake.memory import MappedMemory, Plane, offset

READY_S = 60.0
SMALL_S = 20.0
END_S = 5.0


class AgentLost(Exception):
    pass


class Ended(AgentLost):
    pass


class Silent(AgentLost):
    pass


class AgentProcess:
    def __init__(self, name: str, told: dict[str, object]) -> None:
        self.name = name
        self.session, self._base = "", 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        streams = StandardStreams(stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = start(agent.__name__, streams=streams, leads_group=False)
        listen(self._process, self._lines.put)
        tell(self._process, json.dumps(told))

    def get_ready(self) -> None:
        """Raises CannotDrive if the engine cannot listen."""
        said = self._hear(READY_S)
        if "refused" in said:
            raise CannotDrive(f"{self.name}: {said['refused']}")
        self.session, self._base = str(said["session"]), int(said["base"])

    def address(self, plane: Plane, peer: int, at: int) -> int:
        return self._base + offset(plane, peer, at)

    def register(self, plane: Plane, peer: int, at: int, size: int) -> None:
        code = self.ask({"do": "register", "plane": int(plane), "peer": peer, "at": at, "size": size}, SMALL_S)
        if code != 0:
            raise CannotDrive(f"{self.name}: registering {size} bytes returned {code}, expected 0")

    def unregister(self, plane: Plane, peer: int, at: int) -> None:
        code = self.ask({"do": "unregister", "plane": int(plane), "peer": peer, "at": at}, SMALL_S)
        if code != 0:
            raise CannotDrive(f"{self.name}: unregister_memory returned {code}, expected 0")

    def begin(self, lanes: Sequence[CallLane]) -> None:
        self.tell({"do": "run", "lanes": to_plain([*lanes])})

    def results(self, within_s: float) -> list[list[Result]]:
        """Raises Ended, Silent."""
        said = self.hear(within_s)
        made: list[list[Result]] = [[value_from(Result, each, "result") for each in lane] for lane in said]
        return made

    def ask(self, told: dict[str, object], within_s: float) -> Any:
        """Return the answer to a command. Raises Ended, Silent, CannotDrive."""
        self.tell(told)
        return self.hear(within_s)

    def tell(self, told: dict[str, object]) -> None:
        tell(self._process, json.dumps(told))

    def hear(self, within_s: float) -> Any:
        """Return the next answer. Raises Ended, Silent; CannotDrive if a call of the engine raised."""
        said = self._hear(within_s)
        if "failed" in said:
            raise CannotDrive(f"{self.name}: {said['failed']}")
        return said["done"]

    def freeze(self) -> None:
        """All threads of the process have stopped when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        close_input(self._process)

    def _hear(self, within_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise Silent(f"{self.name} did not answer within {within_s:g} s") from None
        if line is None:
            raise Ended(f"{self.name}'s process {self._ending()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def _ending(self) -> str:
        if not has_ended(self._process, END_S):
            return "closed its output"
        code = self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def start_all(
    names: Sequence[str], *, network: str | None, memory: MappedMemory, variables: dict[str, str], needs: Sequence[str]
) -> list[AgentProcess]:
    """Return ready agents. If one does not get ready, ends all and raises CannotDrive."""
    told: dict[str, object] = {"network": network, "memory": memory.file, "variables": variables, "needs": [*needs]}
    made: list[AgentProcess] = []
    is_ready = False
    try:
        for name in names:
            made.append(AgentProcess(name, told))
        for each in made:
            each.get_ready()
        is_ready = True
    except AgentLost as why:
        raise CannotDrive(f"{why}: getting ready") from why
    finally:
        if not is_ready:
            for each in made:
                each.close()
    return made


def wait_until(is_so: Callable[[], bool], within_s: float, every_s: float = 0.001) -> bool:
    until = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True
