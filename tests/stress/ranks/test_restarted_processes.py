"""Ranks that die and start again: old rooms fail, the new process is served, and nothing of the old one counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache.transfer.test_sender import ROOM, ask, hand_over, want
from rigs.live_processes import poll
from rigs.pair import Rig
from stress.ranks.test_real_processes import TroubledSupervisor, importable, outcome, plan_of
from stress.ranks.test_troubled_processes import late_bytes

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.messages import Abort, Done, Drained, Message, Status, Want, encode
from kvcheck.core.cache.transfer.receiver import FAILED, TRANSFERRING, InboundRoom
from kvcheck.core.cache.transfer.sender import REFUSED, UNWANTED, WANTED
from kvcheck.core.cache.transfer.sockets.link import FrameKind, Link
from kvcheck.core.cache.transfer.sockets.wire import SocketWire
from kvcheck.core.stress.ranks.rank import RankRun

__all__ = ["importable"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "rank", "at", "number", "ranks"),
    [
        ("tcp", "prefill-0", "wrote", 8, "1x2"),
        ("ipc", "decode-0", "receive", 6, "2x1"),
        pytest.param("mooncake", "prefill-0", "wrote", 8, "1x2", marks=pytest.mark.mooncake),
        pytest.param("mooncake", "decode-0", "receive", 6, "2x1", marks=pytest.mark.mooncake),
    ],
)
def test_a_rank_that_was_started_again_is_served(transport: str, rank: str, at: str, number: int, ranks: str) -> None:
    plan = plan_of(transport=transport, ranks=ranks)
    supervisor = TroubledSupervisor(
        plan, extra={rank: {"die": {"at": at, "number": number}}}, silence_s=60, restarts=(rank,)
    )
    judged = outcome(supervisor, plan, troubled=frozenset({rank}))
    assert judged.findings == () and judged.verified == judged.expected > 0
    assert supervisor.reports[rank].lives == [f"{rank} ended by signal 9"]
    for name, report in supervisor.reports.items():
        assert report.summary is not None and not report.death and not report.lost, name
        if name.startswith(rank.partition("-")[0]):
            continue
        assert report.rejoined == [f"{rank}.2"] and not report.refused
    for report in (each for name, each in supervisor.reports.items() if name.startswith("decode")):
        assert report.finished.keys() | report.failed.keys() | report.aborted == set(range(1, 11))
        assert {6, 7} <= report.finished.keys() - report.before, "they came after that, and nothing was done to them"
        assert any("is gone" in reason or "another rank" in reason for reason in report.failed.values())


# A wire whose peer comes back


@contextmanager
def two_lives() -> Iterator[tuple[SocketWire, socket.socket, socket.socket, Link, torch.Tensor]]:
    """A wire with a link to a peer, another link of its next life, both far ends, and memory that it may write."""
    wire = SocketWire(ScopedBackend(RegionBackend(), "decode-0"))
    memory = torch.zeros(8, dtype=torch.uint8)
    wire.register("kv", memory)
    (ours, old), (again, new) = socket.socketpair(), socket.socketpair()
    first, second = (Link(each, {"name": "prefill-0"}) for each in (ours, again))
    with old, new:
        wire.start([first])
        yield wire, old, new, second, memory
        first.free()
        second.free()


def say(end: socket.socket, message: Message) -> None:
    text = encode(message)
    end.sendall(bytes([FrameKind.MESSAGE]) + len(text).to_bytes(4, "little") + text)


def taken(wire: SocketWire, count: int) -> list[Message]:
    messages: list[Message] = []

    def have() -> bool:
        messages.extend(message for _, message in wire.receive())
        return len(messages) >= count

    assert poll(have)
    return messages


WANT = Want(room=5, attempt=0, generation=9, request=1, tokens=4, slot=1, state_slot=0, runs=(("kv.full", 0, (3,)),))


@pytest.mark.parametrize("data", [b"x", b"\2\0\0\0\0\0\xff\xff", b"\0\0\5\0\0\0abc"], ids=["short", "name", "places"])
def test_a_peer_whose_bytes_nobody_can_read_is_gone(data: bytes) -> None:
    with two_lives() as (wire, old, _, _, memory):
        old.sendall(bytes([FrameKind.DATA]) + len(data).to_bytes(4, "little") + data)
        assert poll(lambda: wire.receive() == [] and wire.gone() == ("prefill-0",))
        assert not memory.any()


def test_a_room_that_was_refused_is_not_aborted_again_when_its_peer_goes() -> None:
    with two_lives() as (wire, old, *_):
        say(old, WANT)
        say(old, replace(WANT, room=6, generation=10))
        taken(wire, 2)
        wire.send("prefill-0", Drained(room=5, generation=8))  # of an attempt before
        wire.send("prefill-0", Drained(room=6, generation=10))
        old.close()
        assert taken(wire, 1) == [Abort(room=5, attempt=0, generation=9, reason="prefill-0 is gone")]


def test_what_the_old_process_said_comes_before_the_new_one_and_its_rooms_end() -> None:
    with two_lives() as (wire, old, new, link, _):
        say(old, WANT)
        (said,) = taken(wire, 1)
        assert said == WANT
        wire.offer(link)
        say(new, replace(WANT, generation=1 << 32))
        assert taken(wire, 1) == [Abort(room=5, attempt=0, generation=9, reason="prefill-0 is gone")]
        assert wire.gone() == ("prefill-0",) and wire.receive() == []
        (newcomer,) = wire.newcomers()
        wire.rejoin(newcomer)
        assert wire.gone() == () and wire.newcomers() == []
        assert taken(wire, 1) == [replace(WANT, generation=1 << 32)]


def test_a_newcomer_waits_until_its_predecessor_is_done_with() -> None:
    with two_lives() as (wire, _, _, link, _):
        wire.offer(link)
        assert wire.newcomers() == [], "the end of the old link has not been taken yet"
        assert poll(lambda: not wire.receive() and wire.gone() == ("prefill-0",))
        assert wire.newcomers() == [link]


def test_late_bytes_of_the_old_process_land_nowhere_and_those_of_the_new_one_do() -> None:
    with two_lives() as (wire, old, new, link, memory):
        wire.offer(link)
        late_bytes(old)
        assert poll(lambda: not wire.receive() and wire.gone() == ("prefill-0",))
        wire.rejoin(wire.newcomers()[0])
        late_bytes(old)
        assert not memory.any()
        late_bytes(new)
        assert poll(lambda: bool(memory.all()))


@pytest.mark.parametrize(("incarnation", "is_let_in"), [(1, False), (2, False), (3, True), ("3", False), (None, False)])
def test_an_older_process_is_not_let_in(incarnation: object, is_let_in: bool) -> None:
    ours, theirs = socket.socketpair()
    run: Any = object.__new__(RankRun)
    offered: list[Link] = []
    said: list[str] = []
    run._incarnations = {"prefill-0": 2}
    run.wire = type("Wire", (), {"offer": staticmethod(offered.append)})
    run._say = lambda event, values: said.append(event)
    with ours, theirs:
        run._offer(Link(ours, {"name": "prefill-0", "incarnation": incarnation}))
        assert (len(offered), said) == ((1, []) if is_let_in else (0, ["refused"]))
        run._offer(Link(ours, {"name": "prefill-7", "incarnation": 5}))
        assert said[-1:] == ["refused"], "nobody knows it"


# The two ends


def test_what_the_old_process_wanted_is_forgotten() -> None:
    """Attempts of the new process may have smaller numbers where it does not know how often it was started."""
    rig = Rig()
    rig.sender.open(ROOM, 1, 7)
    ask(rig, want(generation=4))
    rig.sender.rejoin(rig.decode.layout)
    assert rig.sender.readiness(ROOM) == UNWANTED
    ask(rig, want(generation=2, slot=2))
    assert rig.sender._wants.of(ROOM, 0)["decode-0"].slot == 2


def expected_room(rig: Rig) -> InboundRoom:
    """A room that the decode end asks for now."""
    holding = rig.decode.pool.open(1)
    assert holding is not None and rig.decode.pool.grow(holding, 8, query=0)
    rig.rooms[ROOM] = rig.receiver.expect(ROOM, holding, 7, 0)
    return rig.rooms[ROOM]


@pytest.mark.parametrize("change", [{"page_size": 32}, {"ranks": 2}, {"model": "other"}])
def test_a_process_with_another_layout_is_refused_by_both_ends(change: dict[str, object]) -> None:
    rig = Rig()
    rig.receiver.fence("prefill-0")
    for end, layout in ((rig.sender, rig.decode.layout), (rig.receiver, rig.prefill.layout)):
        with pytest.raises(LayoutMismatch, match=next(iter(change))):
            end.rejoin(replace(layout, **change))  # type: ignore[arg-type]
    assert expected_room(rig).status == FAILED, "it is still gone"


def test_a_source_that_came_back_is_asked_under_a_number_that_nobody_used() -> None:
    rig = Rig()
    rig.receiver._attempts = 3 << 32
    rig.receiver.fence("prefill-0")
    rig.receiver.rejoin(rig.prefill.layout)
    assert expected_room(rig).status == TRANSFERRING
    (asked,) = [message for _, message, _ in rig.prefill.wire.inbox]
    assert isinstance(asked, Want) and asked.generation == (3 << 32) + 1


def test_a_room_that_was_served_is_not_served_again() -> None:
    rig = Rig()
    hand_over(rig)
    ask(rig, Done(room=ROOM, generation=4, is_ok=True))
    rig.sender.close(ROOM)
    again = want(generation=1 << 32)
    assert ask(rig, again) == [
        Status(room=ROOM, generation=1 << 32, is_ok=False, reason="it was served before"),
        Drained(room=ROOM, generation=1 << 32),
    ]
    assert rig.sender.unopened == []
    ask(rig, want(room=6, request=8, generation=(1 << 32) + 1))
    assert rig.sender.unopened == [8]
    rig.sender.open(6, 8, 7)
    assert rig.sender.unopened == [] and rig.sender.readiness(6) == WANTED != REFUSED
