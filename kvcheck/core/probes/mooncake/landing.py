"""Probe landing: all bytes of a write that is reported done have landed, for every size, batch and number of peers.

Subjects are the write calls. `frozen` writes to a peer that is stopped and then continues: a write reported done
meanwhile lies in a queue, not in the peer's memory.

A schedule without a finding has made equally many calls in each size class, also at both ends of a class.
"""

from __future__ import annotations

import time

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake.agents import AgentLost, AgentProcess, Silent
from kvcheck.core.probes.mooncake.lanes import Result
from kvcheck.core.probes.mooncake.memory import MOST_PEERS
from kvcheck.core.probes.mooncake.scene import CALL_S, SIZE_CLASSES, Scene, TransferRig, Writes, spread

CALLS_OF_A_CLASS = 4
MOST_BATCH = 64
FROZEN_S = 0.3
QUIET_S = 0.2
FROZEN_CALLS = 6
ENOUGH = 40
"""Wrong writes after which a schedule ends."""
MOST_FROZEN = 64 << 10
"""Bytes of a write that fit the system's buffers, so that it could be reported done while the peer is stopped."""


class LandingRound:
    def needs(self, subject: str) -> tuple[str, ...]:
        return {"async": ("async", "async.status"), "submit": ("submit", "submit.status")}.get(
            subject, ("batch" if subject == "frozen" else subject,)
        )

    def scene(self, rig: TransferRig) -> Scene:
        peers = 1 if rig.subject == "frozen" else MOST_PEERS
        return Scene(rig, self.needs(rig.subject), peers=peers, settings={})

    def control(self, scene: Scene) -> None:
        for peer in range(len(scene.peers)):
            scene.run_healthy([scene.lane(peer, [scene.call(_call_of(scene), peer, spread(scene.rig.mix, [64]))])])

    def measure(self, scene: Scene) -> None:
        if scene.rig.subject == "frozen":
            for _ in range(FROZEN_CALLS):
                _write_to_frozen(scene)
        else:
            calls = [(low, high, turn) for _, low, high in SIZE_CLASSES for turn in range(CALLS_OF_A_CLASS)]
            while calls and scene.wrong.told < ENOUGH:
                low, high, turn = calls.pop(scene.rig.mix.below(len(calls)))
                _write(scene, low, high, turn)
                scene.check_quiet()
        time.sleep(QUIET_S)
        scene.check_quiet()


def _call_of(scene: Scene) -> str:
    return "batch" if scene.rig.subject == "frozen" else scene.rig.subject


def _write(scene: Scene, low: int, high: int, turn: int) -> None:
    """turn: 0 and 1 use the ends of the class."""
    mix = scene.rig.mix
    lanes = []
    first = mix.below(MOST_PEERS)
    for number in range(1 + mix.below(MOST_PEERS)):
        peer = (first + number) % MOST_PEERS
        lanes.append(scene.lane(peer, [scene.call(_call_of(scene), peer, _sizes(scene, low, high, turn))]))
    scene.run_healthy(lanes)


def _sizes(scene: Scene, low: int, high: int, turn: int) -> Writes:
    mix = scene.rig.mix
    sizes = [low + mix.below(high - low + 1) for _ in range(1 + mix.below(MOST_BATCH))]
    if turn < 2:
        sizes[0] = (low, high)[turn]
    return spread(mix, sizes)


def _write_to_frozen(scene: Scene) -> None:
    mix, writer, peer = scene.rig.mix, scene.writers[0], scene.peers[0]
    sizes = [64 + mix.below(MOST_FROZEN // 4) for _ in range(1 + mix.below(4))]
    lanes = [scene.lane(0, [scene.call("batch", 0, spread(mix, sizes))])]
    peer.freeze()
    try:
        writer.begin(lanes)
        results = _results_soon(writer)
        peer.thaw()
        if results is None:
            results = writer.results(CALL_S)
    except AgentLost as why:
        raise CannotDrive(str(why)) from why
    finally:
        peer.thaw()
    failed = [result for of_lane in results for result in of_lane if not result.is_done]
    if failed:
        raise CannotDrive(f"a call to a peer that was stopped for {FROZEN_S:g} s returned {failed[0].code}")
    scene.judge(lanes, results)


def _results_soon(writer: AgentProcess) -> list[list[Result]] | None:
    try:
        return writer.results(FROZEN_S)
    except Silent:
        return None
