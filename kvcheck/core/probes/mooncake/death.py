"""Probe death: killing or stopping a process in the middle of a write harms no other process.

    killed, frozen    a peer, during writes to it and to two others
    writer-killed     a writer, during a write to a peer that another writer uses afterwards

A healthy peer is harmed only if every call to it fails for HARMED_S: a busy machine is no finding.
"""

from __future__ import annotations

import time

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake import SOON, STATED, longest_call_s
from kvcheck.core.probes.mooncake.agents import AgentLost, Ended, Silent, wait_until
from kvcheck.core.probes.mooncake.lanes import CallLane, Result
from kvcheck.core.probes.mooncake.memory import GUARD, REGION, Plane
from kvcheck.core.probes.mooncake.scene import Scene, TransferRig, Writes, spread

VICTIM = 0
BIG = ((1 << 20),) * 12
TIMES = 200
"""Sequential calls to the victim: more than a second, so that it is hit before they are done."""
SMALL_SIZE, SMALL_COUNT, SMALL_CALLS = 64 << 10, 16, 12
BEGIN_S = 10.0
SETTLE_S = 0.5
HARMED_S, LEAST_TRIES, BETWEEN_S = 20.0, 3, 0.2
AFTER_BIG = 13 << 20
"""Start of memory that the dead writer did not write to."""


class Death:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ("batch",)

    def scene(self, rig: TransferRig) -> Scene:
        is_writer = rig.subject == "writer-killed"
        return Scene(
            rig, self.needs(rig.subject), peers=2 if is_writer else 3, writers=2 if is_writer else 1, settings=SOON
        )

    def control(self, scene: Scene) -> None:
        for writer in range(len(scene.writers)):
            for peer in range(len(scene.peers)):
                call = scene.call("batch", peer, spread(scene.rig.mix, BIG[:2]))
                scene.run_healthy([scene.lane(peer, [call])], writer)
        scene.check_quiet()

    def measure(self, scene: Scene) -> None:
        if scene.rig.subject == "writer-killed":
            _kill_writer(scene)
        else:
            _hit_peer(scene)


def _big(scene: Scene) -> CallLane:
    call = scene.call("batch", VICTIM, spread(scene.rig.mix, BIG))
    return scene.lane(VICTIM, [call] * TIMES)


def _small(scene: Scene, peer: int) -> CallLane:
    writes = spread(scene.rig.mix, [SMALL_SIZE] * SMALL_COUNT * SMALL_CALLS)
    groups = [writes[at : at + SMALL_COUNT] for at in range(0, len(writes), SMALL_COUNT)]
    return scene.lane(peer, [scene.call("batch", peer, group) for group in groups])


def _has_begun(scene: Scene, lane: CallLane) -> bool:
    at, _ = lane.calls[0].writes[0]
    return scene.memory.is_equal(Plane.SOURCE, Plane.TARGET, VICTIM, at, 64)


def _hit_peer(scene: Scene) -> None:
    lanes = [_big(scene), _small(scene, 1), _small(scene, 2)]
    results = _hit(scene, lanes)
    if results is None:
        return
    scene.judge(lanes[1:], results[1:])
    if all(result.is_done for result in results[0]):
        raise CannotDrive(f"all calls to the peer were done before it was {scene.rig.subject}")
    scene.rig.tally.count("aborts")
    for lane, of_lane in zip(lanes[1:], results[1:], strict=True):
        if any(not result.is_done for result in of_lane):
            scene.rig.tally.note(f"a call to a healthy peer failed while another peer was {scene.rig.subject}")
        _require_alive(scene, lane.peer, 0, spread(scene.rig.mix, [SMALL_SIZE] * SMALL_COUNT))
    scene.check_quiet((1, 2))


def _hit(scene: Scene, lanes: list[CallLane]) -> list[list[Result]] | None:
    """Return None, with a finding, if the writer was lost."""
    writer, victim, subject = scene.writers[0], scene.peers[VICTIM], scene.rig.subject
    limit_s = longest_call_s(scene.variables)
    writer.begin(lanes)
    has_begun = wait_until(lambda: _has_begun(scene, lanes[0]), BEGIN_S, every_s=0.0002)
    if subject == "frozen":
        victim.freeze()
    else:
        victim.kill()
    try:
        results = writer.results(limit_s)
    except Silent:
        text = f"1 of 1 calls had not ended {limit_s:g} s after its peer was {subject}; the library states {STATED}"
        scene.rig.tally.find("KV901", "liveness", f"{text}={scene.variables[STATED]} s", lane="call")
        return None
    except Ended as why:
        scene.rig.tally.find("KV902", "liveness", f"{why} after its peer was {subject}", lane="writer")
        return None
    if not has_begun:
        raise CannotDrive(f"no byte of the write was there within {BEGIN_S:g} s")
    return results


def _require_alive(scene: Scene, peer: int, writer: int, writes: Writes) -> None:
    """It is a finding if all tries fail for longer than the library's limits."""
    codes: list[int] = []
    until = time.monotonic() + HARMED_S
    while len(codes) < LEAST_TRIES or time.monotonic() < until:
        lanes = [scene.lane(peer, [scene.call("batch", peer, writes)])]
        ((result,),) = scene.run(lanes, writer)
        if result.is_done:
            return
        codes.append(result.code)
        time.sleep(BETWEEN_S)
    text = (
        f"{len(codes)} of {len(codes)} calls to peer {peer}, which is well, failed within {HARMED_S:g} s or more after "
        f"another process was {scene.rig.subject}, the last with {codes[-1]}"
    )
    scene.rig.tally.find("KV902", "liveness", text, lane="others")


def _kill_writer(scene: Scene) -> None:
    lane = _big(scene)
    scene.writers[0].begin([lane])
    has_begun = wait_until(lambda: _has_begun(scene, lane), BEGIN_S, every_s=0.0002)
    scene.writers[0].kill()
    try:
        scene.writers[0].results(SETTLE_S)
    except Ended:
        pass  # so it has to be
    else:
        raise CannotDrive("the writer had done all its calls before it was killed")
    if not has_begun:
        raise CannotDrive(f"no byte of the write was there within {BEGIN_S:g} s")
    scene.rig.tally.count("aborts")
    for number, peer in enumerate(scene.peers):
        try:
            peer.ask({"do": "echo"}, longest_call_s(scene.variables))
        except AgentLost as why:
            scene.rig.tally.find("KV902", "liveness", f"{why} after its writer was killed", lane="receiver")
            return
        writes = tuple((at, size) for at, size in spread(scene.rig.mix, [SMALL_SIZE] * 30) if GUARD <= at < REGION)
        moved = tuple((at + AFTER_BIG - GUARD, size) for at, size in writes)
        _require_alive(scene, number, 1, moved)
    scene.check_quiet((1,))
