"""Probe registration: a write to memory that its peer has not registered is refused, and changes nothing anywhere.

All addressed memory exists in the peer, so an accepted write shows in bytes and not in a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake.agents import AgentProcess
from kvcheck.core.probes.mooncake.memory import GUARD, MOST_PEERS, REGION, Plane
from kvcheck.core.probes.mooncake.scene import Scene, TransferRig

SIZE = 4096
START, END = GUARD, REGION - GUARD
NOBODYS = MOST_PEERS - 1
LOOK_S = 0.05
LEGAL_TRIES = 3

Place = Callable[[AgentProcess], int]


def _in_region(at: int) -> Place:
    return lambda peer: peer.address(Plane.TARGET, 0, at)


FREED = "to memory that is registered no more"
ILLEGAL: dict[str, Place] = {
    "before the registered memory": _in_region(START - SIZE),
    "from one word before the registered memory": _in_region(START - 8),
    "up to one byte behind the registered memory": _in_region(END - SIZE + 1),
    "up to one page behind the registered memory": _in_region(END),
    "to memory that was never registered": lambda peer: peer.address(Plane.TARGET, NOBODYS, START),
    FREED: lambda peer: peer.address(Plane.REUSED, 0, START),
}


class Registration:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (subject, "register", "unregister")

    def scene(self, rig: TransferRig) -> Scene:
        return Scene(rig, self.needs(rig.subject), peers=1, settings={})

    def control(self, scene: Scene) -> None:
        scene.peers[0].register(Plane.REUSED, 0, START, SIZE)
        call = scene.call(scene.rig.subject, 0, ((START + SIZE, SIZE),))
        scene.run_unjudged([scene.lane(0, [replace(call, addresses=(ILLEGAL[FREED](scene.peers[0]),))])])
        scene.peers[0].unregister(Plane.REUSED, 0, START)
        for at in (START, END - SIZE):
            scene.run_healthy([scene.lane(0, [scene.call(scene.rig.subject, 0, ((at, SIZE),))])])
        scene.check_quiet()

    def measure(self, scene: Scene) -> None:
        left = [*ILLEGAL]
        while left:
            name = left.pop(scene.rig.mix.below(len(left)))
            _refuse(scene, name)
            _write_again(scene, name)
        scene.check_quiet()


def _write_again(scene: Scene, name: str) -> None:
    """A first try may fail: the engine may drop a connection after a refusal."""
    for number in range(LEGAL_TRIES):
        ((result,),) = scene.run([scene.lane(0, [scene.call(scene.rig.subject, 0, ((START, SIZE),))])])
        if result.is_done:
            if number:
                scene.rig.tally.note("a legal write right after a refused one failed, and a later try was done")
            return
    raise CannotDrive(f"{LEGAL_TRIES} of {LEGAL_TRIES} legal writes after one {name} failed")


def _refuse(scene: Scene, name: str) -> None:
    tally, memory = scene.rig.tally, scene.memory
    place = ILLEGAL[name](scene.peers[0])
    call = scene.call(scene.rig.subject, 0, ((START + SIZE, SIZE),))
    call = replace(call, addresses=(place,))
    at = place - scene.peers[0].address(Plane.SOURCE, 0, 0)
    before = memory.read(Plane.SOURCE, 0, at, SIZE)
    ((result,),) = scene.run_unjudged([scene.lane(0, [call])])
    time.sleep(LOOK_S)
    after = memory.read(Plane.SOURCE, 0, at, SIZE)
    scene.count_words(SIZE)
    tally.reads += 1
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    strayed = scene.strayed(0, place - scene.peers[0].address(Plane.TARGET, 0, 0), SIZE)
    ended = "reported done" if result.is_done else f"refused with {result.code}"
    if result.is_done or changed or strayed:
        what = f"1 of 1 writes of {SIZE} bytes {name} was {ended}, and changed {changed} bytes there"
        what += f" and {strayed} elsewhere in the peer's region" if strayed else ""
        tally.find("KV308", "contract", what, lane=name, tier="peer")
    else:
        tally.count("refusals")
