"""A rank's process that dies, freezes, or whose engine lies, at a point that the test named."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rigs.live_processes import poll

from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.transfer.messages import Done, Message, Want
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket
from kvcheck.core.stress.ranks.spec import RankSpec
from kvcheck.core.stress.ranks.worker import main, wire_of
from kvcheck.core.stress.targets.mutants import mutant
from kvcheck.core.stress.targets.target import FIXED, TargetParts

READY_S = 60.0


def troubled(order: RankSpec) -> type[ProcessWire]:
    """The plan's wire, with what `order.extra` asks for.

    die: {"at": write, wrote, send or receive, "number": of that call, from 1}
    freeze: the same, and "whole": whether its engine process is frozen too
    mutant: the name of one, whose parts it is made of
    break_engine_at: the request before whose KV is written the engine process is killed
    apart: {"request": whose engine dies, "from": [requests]}: none of them is under way in that time, which ends when
        a peer has another engine. Earlier ones are over before it begins, later ones begin behind it
    all_ready: the file that is there when all ranks are ready; no rank dies or freezes before
    lie: {"requests": [...], "leg": which write is reported before it is made, "late_s": 0 for never,
        "on_lane": whether the wire itself makes it late: the wire has a lane for it, and its beginning is in time}
    """
    die: Any = order.extra.get("die", {})
    freeze: Any = order.extra.get("freeze", {})
    lie: Any = order.extra.get("lie", {})
    counts: dict[str, int] = {}

    def point(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1
        if die and (die["at"], die["number"]) == (name, counts[name]):
            wait_for_the_others()
            os.kill(os.getpid(), signal.SIGKILL)
        if freeze and (freeze["at"], freeze["number"]) == (name, counts[name]):
            wait_for_the_others()
            os.kill(0 if freeze["whole"] else os.getpid(), signal.SIGSTOP)

    def wait_for_the_others() -> None:
        assert poll(Path(str(order.extra["all_ready"])).exists, READY_S), "a rank never got ready"

    apart = Apart(**order.extra["apart"]) if "apart" in order.extra else None  # type: ignore[arg-type]

    class Troubled(wire_of(order)):  # type: ignore[misc]
        def write(
            self, peer: str, leg: str, writes: Sequence[RegionWrite], *, ticket: Ticket, after: Sequence[Signal]
        ) -> Signal:
            point("write")
            done = super().write(peer, leg, writes, ticket=ticket, after=after)
            point("wrote")
            return done

        def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
            point("send")
            super().send(peer, message, after=after)

        def receive(self) -> list[tuple[str, Message]]:
            messages = super().receive()
            for _ in messages:
                point("receive")
            return apart.let_through(messages) if apart else messages

        def _take_engine(self, peer: str, payload: bytearray) -> None:
            super()._take_engine(peer, payload)
            if apart:
                apart.announced(peer)

        def _move(self, peer: str, leg: str, writes: Sequence[RegionWrite], ticket: Ticket) -> Signal:
            if ticket.request == order.extra.get("break_engine_at") and leg == "kv":
                os.kill(self.engine.pid, signal.SIGKILL)
            if not lie or leg != lie["leg"] or ticket.request not in lie["requests"]:
                return super()._move(peer, leg, writes, ticket)
            if lie.get("on_lane"):
                self.late_s, usual = lambda leg, ticket: lie["late_s"], self.late_s
                moved = super()._move(peer, leg, writes, ticket)
                self.late_s = usual
                return moved
            if lie["late_s"]:
                threading.Timer(lie["late_s"], super()._move, (peer, leg, writes, ticket)).start()
            return self.backend.signal()

    return Troubled


class Apart:
    """Keeps some requests of a prefill rank from being written while a peer replaces its engine.

    A write that meets an engine which is being replaced fails, and costs its room too; in which rooms there is one then
    is a matter of the machine's load. What is held back is a peer's Want: without it nothing of a room is written.
    """

    def __init__(self, *, request: int, **others: list[int]) -> None:
        self._request = request
        self._before = {other for other in others["from"] if other < request}
        self._behind = {other for other in others["from"] if other > request}
        self._requests: dict[int, int] = {}  # room -> request
        self._asked: dict[int, set[str]] = {}  # request -> peers that have asked for it
        self._over: dict[int, set[str]] = {}  # request -> peers that are done with it
        self._held: list[tuple[str, Message]] = []
        self._announced: set[str] = set()
        self._is_replaced = False

    def announced(self, peer: str) -> None:
        """A peer has told where its engine is: its first one, or another."""
        self._is_replaced |= peer in self._announced
        self._announced.add(peer)

    def let_through(self, messages: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
        """Messages that are in time, of these and of those held back."""
        for peer, message in messages:
            if isinstance(message, Want):
                self._requests[message.room] = message.request
                self._asked.setdefault(message.request, set()).add(peer)
            elif isinstance(message, Done):
                self._over.setdefault(self._requests[message.room], set()).add(peer)
        arrived, self._held = self._held + messages, []
        passed: list[tuple[str, Message]] = []
        held: set[tuple[str, int]] = set()
        for peer, message in arrived:
            is_behind = isinstance(message, Want) and peer in {other for other, _ in held}  # it would make them copies
            if is_behind or (peer, message.room) in held or not self._is_in_time(message):
                held.add((peer, message.room))
                self._held.append((peer, message))
            else:
                passed.append((peer, message))
        return passed

    def _is_in_time(self, message: Message) -> bool:
        request = self._requests.get(message.room)
        if request in self._behind:
            return self._is_replaced
        return request != self._request or all(
            self._over.get(other) and self._over[other] == self._asked[other] for other in self._before
        )


class BelievesStatus(Receiver):
    """A room has arrived when its sources have reported it."""

    def _is_sealed(self, peer: str, receiving: InboundRoom) -> bool:
        return True


STATUS_BELIEVED = "status-believed"
"""A mutant of these tests: in one process, the mutants of the seal show the same."""


def parts(order: RankSpec) -> TargetParts:
    name = order.extra.get("mutant")
    if name == STATUS_BELIEVED:
        return replace(FIXED, receiver=BelievesStatus)
    return mutant(str(name)).parts if name else FIXED


if __name__ == "__main__":
    sys.exit(main(troubled, parts))
