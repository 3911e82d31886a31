"""Ranks as real processes in trouble: frozen by SIGSTOP inside a call, and woken by what another rank says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from rigs.live_processes import poll
from stress.ranks.test_real_processes import TroubledSupervisor, importable, outcome, plan_of

from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.events import Allocated, Freed
from kvcheck.core.cache.scheduler.process_group import GroupLost, ProcessRanks
from kvcheck.core.cache.transfer.messages import Done, Drained, Want
from kvcheck.core.cache.transfer.sockets.link import SEND_S, FrameKind, Link, LinkLost
from kvcheck.core.cache.transfer.sockets.wire import COUNTS, SocketWire
from kvcheck.core.stress.ranks.quarantine import Quarantine
from kvcheck.core.stress.ranks.supervisor import RankReport
from kvcheck.core.stress.ranks.verdict import RankJudgement

__all__ = ["importable"]

MOONCAKE = pytest.mark.mooncake
STILL_S = 0.5
"""How long a rank stays frozen after it could be woken: long enough for the others to go wrong."""

Stories = Mapping[str, RankReport]


class Waker(TroubledSupervisor):
    """Wakes a frozen rank when the others have said enough. woken_with: requests that had finished by then."""

    frozen = ""
    woken_with = -1

    def __init__(self, *args: object, is_enough: Callable[[Stories], bool], **values: object) -> None:
        super().__init__(*args, **values)  # type: ignore[arg-type]
        self._is_enough = is_enough

    def _take(self, name: str, event: dict[str, object] | None) -> None:
        super()._take(name, event)
        if self.frozen and self._is_enough(self.reports):
            time.sleep(STILL_S)
            os.killpg(self.pid(self.frozen), signal.SIGCONT)
            self.woken_with = len(self.reports["decode-0"].finished)
            self.frozen = ""


def freeze(
    rank: str,
    point: tuple[str, int],
    is_enough: Callable[[Stories], bool],
    *,
    transport: str,
    ranks: str = "1x1",
    patience_s: int = 20,
    lease_s: float = 20,
    mutant: str = "",
) -> tuple[Waker, RankJudgement]:
    """A run in which a rank, with its engine, is frozen at that call; judged."""
    plan = plan_of(transport=transport, ranks=ranks)
    at, number = point
    extra: dict[str, dict[str, object]] = {rank: {"freeze": {"at": at, "number": number, "whole": True}}}
    extra["decode-0"] = {**extra.get("decode-0", {}), "mutant": mutant}
    supervisor = Waker(plan, extra=extra, silence_s=60, patience_s=patience_s, lease_s=lease_s, is_enough=is_enough)
    supervisor.frozen = rank
    judged = outcome(supervisor, plan, troubled=frozenset({rank}))
    assert supervisor.woken_with >= 0, "it was frozen, and the others noticed"
    for report in supervisor.reports.values():
        assert report.summary is not None and report.is_idle, report.name
        assert all(free == total for free, total in report.summary.returned.values())
    return supervisor, judged


def gave_up(name: str) -> Callable[[Stories], bool]:
    """A room was too late there, or a write to it broke down."""
    return lambda reports: any(
        "rounds or seconds" in reason or "returned -1" in reason for reason in reports[name].failed.values()
    )


def cut_off(name: str) -> Callable[[Stories], bool]:
    return lambda reports: bool(reports[name].fenced)


def is_alone(name: str) -> Callable[[Stories], bool]:
    """The ranks of its end did not answer there."""
    return lambda reports: bool(reports[name].lost)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "rank", "point", "who"),
    [
        ("tcp", "prefill-0", ("wrote", 5), "decode-0"),
        ("tcp", "decode-0", ("receive", 6), "prefill-0"),
        pytest.param("mooncake", "prefill-0", ("wrote", 5), "decode-0", marks=MOONCAKE),
    ],
)
def test_a_peer_that_is_frozen_for_longer_than_a_room_may_take_costs_its_rooms(
    transport: str, rank: str, point: tuple[str, int], who: str
) -> None:
    """Not of a decode rank over Mooncake: a write to it stays in the library until the lease has ended."""
    supervisor, judged = freeze(rank, point, gave_up(who), transport=transport, patience_s=2)
    assert judged.findings == () and judged.verified == judged.expected
    report = supervisor.reports["decode-0"]
    assert not any(each.fenced for each in supervisor.reports.values())
    assert len(report.finished) > supervisor.woken_with, "it is served again after that"
    assert report.finished.keys() | report.failed.keys() | report.aborted == set(range(1, 11))


@pytest.mark.processes
def test_memory_that_a_frozen_peer_may_write_is_not_given_back() -> None:
    """The mutant gives it back at once: seen by the quarantine, whatever the late bytes then hit."""
    mutant = "slot-freed-before-drain"
    _, judged = freeze("prefill-0", ("wrote", 5), gave_up("decode-0"), transport="tcp", patience_s=2, mutant=mutant)
    found = [each for each in judged.findings if each.code == "KV202"]
    assert found and all("while prefill-0 may still write it" in each.message for each in found)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "rank", "point", "is_enough", "ranks"),
    [
        pytest.param("mooncake", "prefill-0", ("wrote", 5), cut_off("decode-0"), "1x1", marks=MOONCAKE),
        pytest.param("mooncake", "decode-0", ("send", 1), cut_off("prefill-0"), "1x1", marks=MOONCAKE),
        ("ipc", "decode-0", ("send", 1), cut_off("prefill-0"), "1x1"),
        pytest.param("mooncake", "decode-1", ("receive", 3), is_alone("decode-0"), "2x2", marks=MOONCAKE),
        pytest.param("mooncake", "prefill-1", ("write", 5), is_alone("prefill-0"), "2x2", marks=MOONCAKE),
    ],
)
def test_a_peer_that_is_frozen_for_longer_than_its_lease_is_cut_off(
    transport: str, rank: str, point: tuple[str, int], is_enough: Callable[[Stories], bool], ranks: str
) -> None:
    """What it does when it comes to itself reaches nobody; it ends all it had, and gives its memory back too."""
    supervisor, judged = freeze(rank, point, is_enough, transport=transport, ranks=ranks, patience_s=3, lease_s=2)
    assert judged.findings == ()
    for name, report in supervisor.reports.items():
        if name.startswith("decode"):
            assert report.finished.keys() | report.failed.keys() | report.aborted == set(range(1, 11))
    other = [report for report in supervisor.reports.values() if rank in report.fenced]
    assert other, "somebody fenced it"


@contextlib.contextmanager
def silent_peer() -> Iterator[tuple[SocketWire, socket.socket, torch.Tensor]]:
    """A wire whose one peer says a word and then nothing; the peer's socket, and memory that it may write."""
    ours, theirs = socket.socketpair()
    wire = SocketWire(ScopedBackend(RegionBackend(), "decode-0"))
    memory = torch.zeros(8, dtype=torch.uint8)
    wire.register("kv", memory)
    theirs.sendall(bytes([FrameKind.BEAT, 0, 0, 0, 0]))
    link = Link(ours, {"name": "prefill-0"})
    with theirs:
        wire.start([link], lease_s=0.4)
        yield wire, theirs, memory
        link.free()


def late_bytes(theirs: socket.socket) -> None:
    """Eight bytes for the region, as the peer's wire would send them."""
    places = (0).to_bytes(8, "little") + (8).to_bytes(8, "little")
    payload = COUNTS.pack(2, 1) + b"kv" + places + b"\xff" * 8
    try:
        theirs.sendall(bytes([FrameKind.DATA]) + len(payload).to_bytes(4, "little") + payload)
    except OSError:
        return  # cut off, as it should be


def test_a_silent_peer_is_cut_off_and_its_late_bytes_land_nowhere() -> None:
    with silent_peer() as (wire, theirs, memory):
        assert poll(lambda: not wire.receive() and wire.gone() == ("prefill-0",))
        late_bytes(theirs)
        time.sleep(0.2)
        assert not memory.any()


def test_a_peer_that_beats_is_kept() -> None:
    with silent_peer() as (wire, theirs, _):
        for _ in range(12):
            time.sleep(0.1)
            theirs.sendall(bytes([FrameKind.BEAT, 0, 0, 0, 0]))
        assert not wire.receive() and wire.gone() == ()
        assert theirs.recv(1) == bytes([FrameKind.BEAT]), "and hears that this side lives"


def test_a_full_buffer_blocks_nobody_for_longer_than_the_lease() -> None:
    with silent_peer() as (wire, _, _), pytest.raises(LinkLost) as lost:
        for _ in range(1000):
            wire.links["prefill-0"].send(FrameKind.DATA, bytes(1 << 16))
    assert SEND_S > 10 and "timed out" not in str(lost.value), "not by the bound of a send, which is far away"


WANT = Want(room=5, attempt=0, generation=2, request=7, tokens=8, slot=1, state_slot=0, runs=(("kv.full", 0, (3,)),))
DRAINED = Drained(room=5, generation=2)


@pytest.mark.parametrize(
    ("end", "findings"),
    [
        (None, 1),
        (("drained", "prefill-0", DRAINED), 0),
        (("drained", "prefill-0", replace(DRAINED, generation=1)), 1),
        (("drained", "prefill-1", DRAINED), 1),
        (("done", "prefill-0", Done(room=5, generation=2, is_ok=True)), 0),
        (("gone", "prefill-0", None), 0),
        (("gone", "prefill-1", None), 1),
    ],
)
def test_the_quarantine_ends_by_the_last_word_of_who_may_write(
    end: tuple[str, str, Drained | Done | None] | None, findings: int
) -> None:
    quarantine = Quarantine("decode-0")
    handlers = dict(quarantine.handlers())
    handlers[Allocated](Allocated("decode-0:full", (3,), 7))
    quarantine.sent("prefill-0", WANT)
    if end is not None:
        how, peer, message = end
        if how == "gone":
            quarantine.gone(peer)
        elif isinstance(message, Done):
            quarantine.sent(peer, message)
        elif message is not None:
            quarantine.received(peer, message)
    handlers[Freed](Freed("decode-0:full", (3,)))
    assert len(quarantine.findings) == findings and quarantine.judged == 1


def test_a_rank_that_stays_away_from_an_agreement_is_lost_within_the_time(tmp_path: Path) -> None:
    made: list[ProcessRanks] = []
    threads = [
        Thread(target=lambda rank=rank: made.append(ProcessRanks(str(tmp_path / "end"), rank, 2, timeout_s=1.0)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    began = time.monotonic()
    with pytest.raises(GroupLost):
        made[0].agree([[1, 2]])
    assert time.monotonic() - began < 10
