"""Probe state-failure: a copy of states fails, and the copies of pages and of metadata around it succeed.

The copy engine reports that every copy of states failed, as over a broken link. In half of the schedules the first of
them succeeds. A request without its states must end on both sides, and on neither as Success.
"""

from __future__ import annotations

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pd_pair import NEEDS
from kvcheck.core.probes.sglang.rig.pools import pool_names
from kvcheck.core.probes.sglang.state_lengths import UNEQUAL, StateTransfer

ROWS = 3


class StateFailure:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*NEEDS, *pool_names(subject))

    def control(self, rig: Rig) -> None:
        transfer = StateTransfer(rig)
        transfer.send(range(ROWS), range(ROWS), ROWS)
        transfer.check_success(UNEQUAL, range(ROWS), "sent with states that were copied")

    def measure(self, rig: Rig) -> None:
        transfer = StateTransfer(rig)
        link, passes = transfer.peers.link, rig.schedule % 2

        def fails(address: int) -> bool:
            nonlocal passes
            if not transfer.is_state(address):
                return False
            rig.record()
            passes -= 1
            return passes < 0

        link.fails = fails
        died = transfer.send(range(ROWS), range(ROWS), ROWS)
        rig.judge.count("requests")
        rig.judge.count("transfers")
        rig.judge.count("orderings_checked")
        if died is not None:
            text = f"the transfer worker died of a copy of states that failed: {died.text} ({died.where})"
            rig.judge.find("KV902", "liveness", text, lane="worker", request=UNEQUAL)
            return
        if not link.failed:
            raise CannotDrive("no copy of states was asked for that could fail")
        _judge(rig, transfer)


def _judge(rig: Rig, transfer: StateTransfer) -> None:
    peers = transfer.peers
    sides = {"prefill": peers.sender, "decode": peers.ranks[0]}
    states = {side: peers.status(manager, UNEQUAL) for side, manager in sides.items()}
    told = ", ".join(f"{side} says {status}" for side, status in states.items())
    what = f"the copy engine said of {peers.link.failed} copies of states that they failed"
    rig.judge.note(f"{what}: {told}")
    rig.judge.reads += len(sides)
    if "Success" in states.values():
        text = f"{what}, and {told}: a request without its states is served"
        rig.judge.find("KV203", "protocol", text, lane="status", request=UNEQUAL)
    elif {*states.values()} != {"Failed"}:
        text = f"{what}, and {told}: one of them waits for ever, and so does whoever needs its pages"
        rig.judge.find("KV901", "liveness", text, lane="status", request=UNEQUAL)
