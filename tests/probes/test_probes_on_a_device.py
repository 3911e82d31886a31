"""Probes with real streams, on a stand-in engine over a stand-in device: what is held, let go, found and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rigs.probe_on_device import FLAG, SPIN
from rigs.probe_on_device import replies as asked

from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.probe_server import ProbeServer
from kvcheck.core.probes.frame.streams import HoldReport
from kvcheck.core.probes.frame.streams import Machine as StandInStreams
from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow
from kvcheck.core.probes.frame.wire import Ask, Reply

SCHEDULES = 2
"""One at random, and one whose load is held throughout."""
READERS, LAYERS = 2, 3
GOOD, NO_WAIT, LAYER_BEFORE = "", "no-wait", "waits-for-layer-before"
ON_HOST, ALL_ON_HOST = "reads-on-host", "all-read-on-host"
FAULTS = {FLAG: (GOOD, NO_WAIT, LAYER_BEFORE, ON_HOST, ALL_ON_HOST), SPIN: (GOOD, LAYER_BEFORE)}
HELD = "work is held until the process lets it go"
SPUN = "work is held by a kernel that spins for a fixed time: triton is needed, and there is none"

Replies = dict[tuple[str, str], list[Reply]]


@pytest.fixture(scope="module")
def replies(fake: Path) -> Replies:
    """What schedules of layer-wait on NSA say, by how work is held and the engine's fault."""
    return {
        (how, fault): said
        for how, faults in FAULTS.items()
        for fault, said in asked(fake, how, "layer-wait.nsa", SCHEDULES, faults).items()
    }


@pytest.mark.processes
@pytest.mark.parametrize(("how", "note"), [(FLAG, HELD), (SPIN, SPUN)])
def test_readers_that_wait_pass_and_the_record_says_what_held_the_load(replies: Replies, how: str, note: str) -> None:
    for reply in replies[how, GOOD]:
        assert (reply.findings, reply.unknown, reply.notes) == ((), None, (note,))
        assert reply.evidence.orderings_checked == READERS * LAYERS


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "fault", "first"), [(FLAG, NO_WAIT, 0), (FLAG, LAYER_BEFORE, 1), (SPIN, LAYER_BEFORE, 1)]
)
def test_a_reader_that_does_not_wait_for_its_layer_is_found(replies: Replies, how: str, fault: str, first: int) -> None:
    at_random, lazy = replies[how, fault]
    assert {each.code for each in at_random.findings} <= {"KV201"}
    (found,) = lazy.findings
    assert (found.code, found.lane, found.buffer) == ("KV201", "get_index_buffer", "index_k")
    assert found.layer is not None and found.layer >= first


@pytest.mark.processes
def test_a_reader_whose_holds_the_watchdog_ends_is_named_and_not_counted(replies: Replies) -> None:
    lazy = replies[FLAG, ON_HOST][1]
    assert (lazy.findings, lazy.unknown, lazy.evidence.orderings_checked) == ((), None, LAYERS)
    lacking, held, ended = lazy.notes
    assert held == HELD and ended.startswith("the watchdog of the device ended ")
    assert lacking.startswith("not exercised: get_index_buffer during a load that is late")


@pytest.mark.processes
def test_a_schedule_without_a_hold_that_imposed_an_order_is_no_pass(replies: Replies) -> None:
    lazy = replies[FLAG, ALL_ON_HOST][1]
    assert (lazy.findings, lazy.unknown) == ((), "not exercised: orderings_checked")
    assert not lazy.evidence.orderings_checked and lazy.evidence.words_verified


class Judges:
    """A probe that compares words, and finds something on the subject "bad"."""

    def needs(self, subject: str) -> tuple[str, ...]:
        return ()

    def control(self, rig: Rig) -> None:
        rig.judge.words["x"] = 1

    def measure(self, rig: Rig) -> None:
        rig.judge.words["x"] = 1
        if rig.subject == "bad":
            rig.judge.find("KV201", "content", "too early")


class Ended(StandInStreams):
    """Streams whose holds the watchdog ended, all of them."""

    def take_report(self) -> HoldReport:
        return HoldReport(placed=2, fired=2)


@pytest.mark.parametrize(("subject", "is_unknown"), [("good", True), ("bad", False)])
def test_a_schedule_all_of_whose_holds_the_watchdog_ended_is_no_pass(subject: str, is_unknown: bool) -> None:
    row = ProbeRow(
        name="own",
        scenario="hicache",
        subjects=("good", "bad"),
        entry=f"{__name__}:Judges",
        shows="",
        devices=("cuda",),
    )
    spec = EngineSpec(name="own", shows="", package="own", stubs=(), table={}, probes=(row,))
    server: Any = ProbeServer(spec, "cuda")
    server._stubs.uninstall()
    server._machine = Ended()
    reply = server.answer(Ask(probe="own", subject=subject, seed=1, schedule=0))
    told = "the watchdog of the device ended 2 of 2 holds"
    assert reply.unknown == (f"not exercised: {told}, so no order was imposed" if is_unknown else None)
    assert f"{told}; these imposed no order" in reply.notes and bool(reply.findings) != is_unknown
