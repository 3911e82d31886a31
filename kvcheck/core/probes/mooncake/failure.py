"""Probe failure: after a failure or a time-out is reported, no bytes of that write land any more.

The caller may then reuse its memory: source and target get other content.

    refused   one write of a batch goes to unregistered memory
    frozen    the peer is stopped until the call has failed, and continues then

Later landing is a conditional finding: the library does not document when memory of a failed write is free again.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.mooncake import SOON, longest_call_s
from kvcheck.core.probes.mooncake.agents import AgentLost
from kvcheck.core.probes.mooncake.lanes import CallLane, EngineCall
from kvcheck.core.probes.mooncake.memory import MOST_PEERS, Plane
from kvcheck.core.probes.mooncake.scene import Scene, TransferRig, spread

WATCH_S = 1.5
REFUSED = (256 << 10, 40)
FROZEN = (1 << 20, 14)
"""Bytes of a write, and writes in the call: more than the system's buffers hold for a stopped peer."""
CONDITION = (
    "memory of a failed write is used again while the writer's engine lives; the library does not say when it is free"
)


class Failure:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ("batch",)

    def scene(self, rig: TransferRig) -> Scene:
        return Scene(rig, self.needs(rig.subject), peers=1, settings=SOON)

    def control(self, scene: Scene) -> None:
        size, count = _batch(scene)
        scene.run_healthy([scene.lane(0, [scene.call("batch", 0, spread(scene.rig.mix, [size] * count))])])
        scene.check_quiet()

    def measure(self, scene: Scene) -> None:
        rig = scene.rig
        size, count = _batch(scene)
        writes = spread(rig.mix, [size] * count)
        call = scene.call("batch", 0, writes, after=True)
        failed = scene.generation
        later = scene.fill(Plane.NEXT, 0, writes)
        reused = scene.fill(Plane.REUSED, 0, writes)
        if rig.subject == "refused":
            bad = rig.mix.below(len(call.writes))
            addresses = [*call.addresses]
            addresses[bad] = scene.peers[0].address(Plane.REUSED, MOST_PEERS - 1, call.writes[bad][0])
            call = replace(call, addresses=tuple(addresses))
        if _fails(scene, scene.lane(0, [call])):
            _watch(scene, call, (failed, later, reused))


def _batch(scene: Scene) -> tuple[int, int]:
    return FROZEN if scene.rig.subject == "frozen" else REFUSED


def _fails(scene: Scene, lane: CallLane) -> bool:
    """Return False, with a finding, if the call was reported done although a write was illegal or the peer stopped."""
    writer, peer = scene.writers[0], scene.peers[0]
    is_frozen = scene.rig.subject == "frozen"
    if is_frozen:
        peer.freeze()
    try:
        writer.begin([lane])
        ((result,),) = writer.results(longest_call_s(scene.variables))
    except AgentLost as why:
        raise CannotDrive(str(why)) from why
    finally:
        peer.thaw()
    tally = scene.rig.tally
    tally.count("transfers", len(lane.calls[0].writes))
    if result.is_done and is_frozen:
        scene.judge([lane], [[result]])
        if not scene.wrong.told:
            raise CannotDrive("a call to a peer that is stopped did not fail, and its bytes are there")
        return False
    if result.is_done:
        text = f"1 of 1 batches of {len(lane.calls[0].writes)} writes was reported done, and one went to no memory"
        tally.find("KV308", "contract", text, lane="accepted")
        return False
    tally.count("aborts")
    return True


def _watch(scene: Scene, call: EngineCall, generations: tuple[int, int, int]) -> None:
    """generations: of the failed write, of the source's later content, of the target's."""
    failed, later, reused = generations
    memory, tally = scene.memory, scene.rig.tally
    time.sleep(WATCH_S)
    landed = [write for write in call.writes if not memory.is_equal(Plane.REUSED, Plane.TARGET, 0, *write)]
    tally.reads += 1
    for _, size in call.writes:
        scene.count_words(size)
    if not landed:
        return
    old = new = strange = 0
    for at, size in landed:
        seen, expected = memory.read(Plane.TARGET, 0, at, size), memory.read(Plane.REUSED, 0, at, size)
        found = scene.held(seen, 0, at, failed, expected)
        old, new = old + found.wanted, new + found.newer
        strange += found.words - found.wanted - found.newer
    assert failed < later < reused
    tally.find(
        "KV203",
        "protocol",
        f"{len(landed)} of {len(call.writes)} writes of a call that had failed landed after the failure was reported, "
        f"on memory that was used again; of the words looked at {old} are of the write, {new} came to its source later"
        + (f", {strange} others" if strange else ""),
        lane="after-failure",
        tier="peer",
        buffer="region",
        condition=CONDITION,
    )
