"""Lanes: sequential writes of a process to one peer, each compared when its status arrives.

The thread that gets a status compares at once: first the ends of all writes, the last write first, and then all bytes.
The ends land last, and comparing them takes microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvcheck.core.probes.mooncake.memory import MappedMemory, Plane

RUNNING = 0
"""Status of a submitted write in progress."""
DONE = 1
POLL_S = 0.00002
END = 64
"""Last bytes of a write, which are compared first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One call of the engine. writes: (offset, bytes) in the peer's region. addresses: of the writes in the peer.

    after: if the call fails, its source is overwritten from NEXT and its target from REUSED, at once.
    """

    name: str
    writes: tuple[tuple[int, int], ...]
    addresses: tuple[int, ...]
    after: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLane:
    """Calls to one peer. session: the engine's name of the peer."""

    peer: int
    session: str
    calls: tuple[EngineCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a call. is_done: the engine reported success. wrong: writes whose target differed at the status."""

    code: int
    is_done: bool
    wrong: tuple[int, ...]
    took_s: float


class LaneRunner:
    """Makes calls of one engine. notified: text -> (opcode, notification)."""

    def __init__(self, engine: Any, memory: MappedMemory, notified: Callable[[str], tuple[Any, Any]]) -> None:
        self._engine = engine
        self._memory = memory
        self._notified = notified

    def run(self, lanes: Sequence[CallLane]) -> list[list[Result]]:
        with ThreadPoolExecutor(max_workers=len(lanes)) as threads:
            return list(threads.map(self._follow, lanes))

    def _follow(self, lane: CallLane) -> list[Result]:
        results: list[Result] = []
        for call in lane.calls:
            results.append(self._call(lane, call))
            if not results[-1].is_done:
                break  # later calls would show nothing
        return results

    def _call(self, lane: CallLane, call: EngineCall) -> Result:
        began = time.monotonic()
        make = {"sync": self._one_by_one, "submit": self._submit}.get(call.name, self._together)
        code, is_done, wrong = make(lane, call)
        if not is_done and call.after:
            for at, size in call.writes:
                self._memory.copy(Plane.NEXT, Plane.SOURCE, lane.peer, at, size)
            for at, size in call.writes:
                self._memory.copy(Plane.REUSED, Plane.TARGET, lane.peer, at, size)
        return Result(code=code, is_done=is_done, wrong=tuple(wrong), took_s=time.monotonic() - began)

    def _together(self, lane: CallLane, call: EngineCall) -> tuple[int, bool, list[int]]:
        local = [self._memory.address(Plane.SOURCE, lane.peer, at) for at, _ in call.writes]
        sizes = [size for _, size in call.writes]
        remote = list(call.addresses)
        if call.name == "async":
            batch = self._engine.batch_transfer_async_write(lane.session, local, remote, sizes)
            if not batch:  # no batch was made; polling its status would end the process
                return -1, False, []
            code = self._engine.get_batch_transfer_status([batch])
        elif call.note:
            opcode, notification = self._notified(call.note)
            if call.name == "notified.batch":
                code = self._engine.batch_transfer_sync(lane.session, local, remote, sizes, opcode, notification)
            else:
                code = self._engine.transfer_sync(lane.session, local[0], remote[0], sizes[0], opcode, notification)
        else:
            code = self._engine.batch_transfer_sync_write(lane.session, local, remote, sizes)
        return code, code == 0, self._looks(lane, call, range(len(sizes))) if code == 0 else []

    def _one_by_one(self, lane: CallLane, call: EngineCall) -> tuple[int, bool, list[int]]:
        wrong: list[int] = []
        for number, (at, size) in enumerate(call.writes):
            local = self._memory.address(Plane.SOURCE, lane.peer, at)
            code = self._engine.transfer_sync_write(lane.session, local, call.addresses[number], size)
            if code != 0:
                return code, False, wrong
            wrong += self._looks(lane, call, (number,))
        return 0, True, wrong

    def _submit(self, lane: CallLane, call: EngineCall) -> tuple[int, bool, list[int]]:
        running: dict[int, int] = {}
        for number, (at, size) in enumerate(call.writes):
            local = self._memory.address(Plane.SOURCE, lane.peer, at)
            running[number] = self._engine.transfer_submit_write(lane.session, local, call.addresses[number], size)
        failed = [number for number, ticket in running.items() if not ticket]
        for number in failed:
            del running[number]
        code, wrong = -1 if failed else 0, []
        while running:
            for number, ticket in [*running.items()]:
                status = self._engine.transfer_check_status(ticket)
                if status == DONE:
                    wrong += self._looks(lane, call, (number,))
                if status != RUNNING:
                    del running[number]
                    code = code if status == DONE else status
            time.sleep(POLL_S)
        return code, code == 0, wrong

    def _looks(self, lane: CallLane, call: EngineCall, numbers: Sequence[int]) -> list[int]:
        """Return the writes whose target differs from the source, and keep it in SEEN."""
        memory, peer = self._memory, lane.peer
        late = set()
        for number in reversed(numbers):
            at, size = call.writes[number]
            end = min(END, size)
            if not memory.is_equal(Plane.SOURCE, Plane.TARGET, peer, at + size - end, end):
                late.add(number)
        wrong = []
        for number in reversed(numbers):
            at, size = call.writes[number]
            if number in late or not memory.is_equal(Plane.SOURCE, Plane.TARGET, peer, at, size):
                memory.copy(Plane.TARGET, Plane.SEEN, peer, at, size)
                wrong.append(number)
        return wrong
