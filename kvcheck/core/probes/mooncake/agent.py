"""Agent: a process with one engine of the installed library, driven by the judge, a JSON line at a time.

Invariants:
- It enters the private network before the library is loaded, and it ends with the judge.
- The library sees the judge's variables; MC_ variables of the user's environment are dropped.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from typing import Any

from kvcheck.core.base.private_network import enter
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.mooncake import NAMES
from kvcheck.core.probes.mooncake.lanes import CallLane, LaneRunner
from kvcheck.core.probes.mooncake.memory import MappedMemory, Plane

HOST = "127.0.0.1"
NO_METADATA_SERVER = "P2PHANDSHAKE"
LISTEN_S = 0.0001


class Agent:
    def __init__(self, told: dict[str, Any]) -> None:
        if told["network"] is not None:
            enter(str(told["network"]))
        for name in [name for name in os.environ if name.startswith("MC_")]:
            del os.environ[name]
        os.environ.update(told["variables"])
        self._memory = MappedMemory(str(told["memory"]))
        self.base = self._memory.base
        self._names = Names(NAMES)
        self._names.require(tuple(told["needs"]))
        self._engine: Any = self._names["engine"]()
        if (code := self._engine.initialize(HOST, NO_METADATA_SERVER, "tcp", "")) != 0:
            raise CannotDrive(f"initialize returned {code}, expected 0")
        self.session = f"{HOST}:{self._engine.get_rpc_port()}"
        self._runner = LaneRunner(self._engine, self._memory, self._notified)

    def answer(self, told: dict[str, Any]) -> object:
        match told["do"]:
            case "register":
                return self._engine.register_memory(self._address(told), told["size"])
            case "unregister":
                return self._engine.unregister_memory(self._address(told))
            case "run":
                return self._runner.run([value_from(CallLane, lane, "lane") for lane in told["lanes"]])
            case "listen":
                return self._listen(told["peer"], told["writes"], told["within_s"])
            case "echo":
                return 0
        raise ValueError(f"expected something to do, got {told['do']!r}")

    def _address(self, told: dict[str, Any]) -> int:
        return self._memory.address(Plane(told["plane"]), told["peer"], told["at"])

    def _notified(self, text: str) -> tuple[Any, Any]:
        return self._names["opcode"].Write, self._names["notification"](text, text)

    def _listen(self, peer: int, writes: dict[str, list[list[int]]], within_s: float) -> dict[str, list[int]]:
        """Return notification -> numbers of its writes whose bytes were missing when it arrived. writes: notification
        -> (offset, bytes) of its writes."""
        heard: dict[str, list[int]] = {}
        until = time.monotonic() + within_s
        while len(heard) < len(writes) and time.monotonic() < until:
            for notification in self._engine.get_notifies():
                expected = writes.get(notification.name, [])
                heard[notification.name] = [
                    number
                    for number, (at, size) in enumerate(expected)
                    if not self._memory.is_equal(Plane.SOURCE, Plane.TARGET, peer, at, size)
                ]
            time.sleep(LISTEN_S)
        return heard


def main() -> None:
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    told = json.loads(sys.stdin.readline())
    try:
        made = attempt(lambda: Agent(told))
    except CannotDrive as why:
        made = Fault(str(why))
    if isinstance(made, Fault):
        say({"refused": made.text})
        os._exit(0)
    say({"session": made.session, "base": made.base})
    for line in sys.stdin:
        told = json.loads(line)
        done = attempt(lambda told=told: made.answer(told))  # type: ignore[misc]
        say({"failed": done.text} if isinstance(done, Fault) else {"done": to_plain(done)})
    os._exit(0)  # the library takes a second to end by itself


if __name__ == "__main__":
    main()
