"""Probe notification: the notification of a write arrives after the data of that write.

The receiver itself compares its bytes as soon as it has the notification.
"""

from __future__ import annotations

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake.agents import AgentLost
from kvcheck.core.probes.mooncake.lanes import EngineCall
from kvcheck.core.probes.mooncake.scene import CALL_S, Scene, TransferRig, spread

CALLS = 24
MOST_BATCH = 8
HEAR_S = 20.0


class Notification:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (f"notified.{subject}", "notification", "notification.list", "opcode")

    def scene(self, rig: TransferRig) -> Scene:
        return Scene(rig, self.needs(rig.subject), peers=1, settings={})

    def control(self, scene: Scene) -> None:
        _write(scene, 1, "c")
        scene.check_quiet()

    def measure(self, scene: Scene) -> None:
        early, tries = _write(scene, CALLS, "n")
        if early:
            scene.rig.tally.find(
                "KV203",
                "protocol",
                f"{len(early)} of {tries} notifications came before the data of their write; the first: {early[0]}",
                lane="notification",
                tier="peer",
                buffer="region",
            )
        scene.check_quiet()


def _write(scene: Scene, count: int, mark: str) -> tuple[list[str], int]:
    mix = scene.rig.mix
    sizes = [64 << mix.below(14) for _ in range(count * (MOST_BATCH if scene.rig.subject == "batch" else 1))]
    places = [*spread(mix, [size + mix.below(size) for size in sizes])]
    calls: list[EngineCall] = []
    while places and len(calls) < count:
        take = 1 + mix.below(MOST_BATCH) if scene.rig.subject == "batch" else 1
        writes, places = tuple(places[:take]), places[take:]
        calls.append(scene.call(f"notified.{scene.rig.subject}", 0, writes, note=f"{mark}{len(calls)}"))
    awaited = {call.note: [[*write] for write in call.writes] for call in calls}
    peer = scene.peers[0]
    peer.tell({"do": "listen", "peer": 0, "writes": awaited, "within_s": HEAR_S})
    scene.run_healthy([scene.lane(0, calls)])
    try:
        heard: dict[str, list[int]] = peer.hear(HEAR_S + CALL_S)
    except AgentLost as why:
        raise CannotDrive(str(why)) from why
    if lacking := [name for name in awaited if name not in heard]:
        raise CannotDrive(f"{len(lacking)} of {len(awaited)} notifications did not come within {HEAR_S:g} s")
    scene.rig.tally.count("orderings_checked", len(heard))
    early = [
        f"{name}, with {len(wrong)} of {len(awaited[name])} writes that were not there; the first of "
        f"{awaited[name][wrong[0]][1]} bytes"
        for name, wrong in heard.items()
        if wrong
    ]
    return early, len(heard)
