"""The wire into shared memory, both ends in this process: what lands when, and who is shut out."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rigs.live_processes import poll

from kvcheck.core.base.errors import LayoutMismatch, TransferError
from kvcheck.core.cache.backend.backend import Place, Signal
from kvcheck.core.cache.backend.copy_lane import CopyLane
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.ipc.wire import Fence, FenceWriter, IpcWire, read_fence
from kvcheck.core.cache.transfer.messages import Done, Drained, Message, Status
from kvcheck.core.cache.transfer.sockets.link import FrameKind, Link
from kvcheck.core.cache.transfer.wire import RegionWrite, Ticket

BYTES = 64
TICKET = Ticket(5, 1, 7)
STATUS = Status(room=5, generation=1, is_ok=True)
LATE_S = 0.4
FULL, HALF, NONE = [0xFF] * BYTES, [0xFF] * (BYTES // 2) + [0] * (BYTES // 2), [0] * BYTES


@dataclass
class End:
    """One end: its wire, and the region "kv" in its memory."""

    wire: IpcWire
    memory: torch.Tensor

    @property
    def bytes(self) -> list[int]:
        """What lies there now."""
        return [*map(int, self.memory.tolist())]


def end(name: str, *, fill: int) -> End:
    backend = ScopedBackend(RegionBackend(), name)
    memory = backend.empty("kv", (BYTES,), torch.uint8, Place.DEVICE).fill_(fill)
    wire = IpcWire(backend)
    wire.register("kv", memory)
    return End(wire, memory)


def join(source: End, target: End, close: ExitStack) -> tuple[Link, Link]:
    """Start both wires over a new connection."""
    ours, theirs = socket.socketpair()
    links = Link(ours, {"name": target.wire.name}), Link(theirs, {"name": source.wire.name})
    starting = threading.Thread(target=target.wire.start, args=([links[1]],))
    starting.start()
    source.wire.start([links[0]])
    starting.join()
    for link in links:
        close.callback(link.free)
    return links


@contextmanager
def two_ends() -> Iterator[tuple[End, End]]:
    """A prefill and a decode end that have met."""
    with ExitStack() as close:
        source, target = end("prefill-0", fill=0xFF), end("decode-0", fill=0)
        join(source, target, close)
        yield source, target


def blocks(*rows: tuple[int, int, int], target: str = "kv") -> RegionWrite:
    return RegionWrite(source="kv", target=target, blocks=np.array(rows, dtype=np.int64), reads=(), writes=())


def write(source: End, leg: str = "kv", block: tuple[int, int, int] = (0, 0, BYTES)) -> Signal:
    return source.wire.write("decode-0", leg, [blocks(block)], ticket=TICKET, after=())


def heard(target: End, count: int = 1, *, beside: Callable[[], object] = list) -> list[Message]:
    """The next messages of the source. beside: called between looks, where the source has to see that they may go."""
    found: list[Message] = []

    def step() -> bool:
        beside()
        found.extend(message for _, message in target.wire.receive())
        return len(found) >= count

    assert poll(step)
    return found


def test_on_the_ordered_path_a_message_waits_for_the_bytes_before_it() -> None:
    with two_ends() as (source, target):
        source.wire.late_s = lambda leg, ticket: LATE_S
        landed = write(source)
        source.wire.send("decode-0", STATUS, after=(landed,))
        assert poll(lambda: target.bytes == HALF)
        assert not source.wire.backend.query(landed) and target.wire.receive() == []
        assert heard(target, beside=source.wire.receive) == [STATUS]
        assert target.bytes == FULL and source.wire.backend.query(landed)


def test_on_an_asynchronous_path_a_status_comes_before_its_bytes() -> None:
    with two_ends() as (source, target):
        source.wire.paths, source.wire.late_s = {"kv": "async"}, lambda leg, ticket: LATE_S
        sent = write(source)
        source.wire.send("decode-0", STATUS, after=(sent,))
        assert heard(target) == [STATUS]
        assert target.bytes in (NONE, HALF)
        assert poll(lambda: target.bytes == FULL)


def test_a_flush_is_behind_every_lane_and_messages_stay_in_order() -> None:
    with two_ends() as (source, target):
        source.wire.paths, source.wire.late_s = {"kv": "async"}, lambda leg, ticket: LATE_S
        write(source)
        write(source, "aux", (0, 0, 8))
        flushed = source.wire.flush("decode-0")
        drained, done = Drained(room=5, generation=1), Done(room=5, generation=1, is_ok=True)
        source.wire.send("decode-0", drained, after=(flushed,))
        source.wire.send("decode-0", done)
        assert not source.wire.backend.query(flushed)
        assert heard(target, 2, beside=source.wire.receive) == [drained, done] and target.bytes == FULL
        assert source.wire.backend.query(source.wire.flush("decode-0"))


@pytest.mark.parametrize("block", [(0, 1, BYTES), (1, 0, BYTES), (-1, 0, 8), (0, -1, 8)])
def test_a_block_outside_a_region_is_refused_and_nothing_is_written(block: tuple[int, int, int]) -> None:
    with two_ends() as (source, target):
        write(source, block=(0, 0, 8))
        with pytest.raises(TransferError, match="a block of kv ends at"):
            write(source, block=block)
        with pytest.raises(TransferError, match="it has no region 'state'; it has kv"):
            source.wire.write("decode-0", "state", [blocks((0, 0, 8), target="state")], ticket=TICKET, after=())
        assert poll(lambda: source.wire.backend.query(source.wire.flush("decode-0")))
        assert target.bytes == FULL[:8] + NONE[8:]


# Peers that are gone


class NeverShut(Fence):
    """Says so, and locks nothing."""

    def shut(self) -> bool:
        """True at once."""
        return True


@pytest.mark.parametrize(("fence", "is_safe"), [(Fence, True), (NeverShut, False)])
def test_a_copy_that_goes_on_after_its_rank_was_cut_off_lands_nowhere(
    fence: type[Fence], is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcheck.core.cache.transfer.ipc.wire.Fence", fence)
    with two_ends() as (source, target):
        source.wire.late_s = lambda leg, ticket: LATE_S
        write(source)
        assert poll(lambda: target.bytes == HALF)
        target.wire.links["prefill-0"].close()
        assert poll(lambda: not target.wire.receive() and target.wire.gone() == ("prefill-0",))
        target.memory.fill_(0)  # another request's from now on
        landing = source.wire.flush("decode-0")
        assert poll(lambda: source.wire.backend.query(landing))
        assert (target.bytes == NONE) is is_safe


def test_memory_waits_for_a_peer_that_is_frozen_within_a_copy() -> None:
    with two_ends() as (source, target):
        write(source)
        _, entry = source.wire._lanes["decode-0"]["ordered"]
        assert poll(lambda: target.bytes == FULL)
        with entry.entered() as is_in:
            assert is_in
            target.wire.links["prefill-0"].close()
            for _ in range(20):
                assert target.wire.receive() == [] and target.wire.gone() == ()
                time.sleep(0.01)
        assert poll(lambda: not target.wire.receive() and target.wire.gone() == ("prefill-0",))
        with entry.entered() as is_in:
            assert not is_in


def test_each_thread_has_a_lock_of_its_own() -> None:
    fence = Fence("prefill-0")
    first, second = (FenceWriter(read_fence(fence.share())) for _ in range(2))
    with first.entered() as one:
        with second.entered() as other:
            assert one and other
        assert not fence.shut(), "the first is still in"
    assert fence.shut() and fence.shut()
    first.close()
    second.close()


# What a peer says of its memory


SAID: list[tuple[Callable[[dict[str, object]], object], str]] = [
    (lambda said: [], "no memory"),
    (lambda said: {"regions": {}}, "no memory"),
    (lambda said: {**said, "fence": {"name": "fence"}}, "no memory"),
    (lambda said: {**said, "regions": 3}, "no memory"),
    (lambda said: {**said, "regions": {"kv": {"memory": "00"}}}, "not the handle of a region"),
    (lambda said: {**said, "regions": {"kv": said["fence"] | {"inode": 1}}}, "is gone"),  # type: ignore[operator]
]


@pytest.mark.parametrize(("change", "why"), SAID)
def test_what_is_no_announcement_is_refused(change: Callable[[dict[str, object]], object], why: str) -> None:
    with two_ends() as (source, target):
        said = json.dumps(change(json.loads(source.wire._announced["decode-0"]))).encode()
        source.wire._take("decode-0", FrameKind.ENGINE, bytearray(said))
        with pytest.raises(TransferError, match=why):
            write(source)
        assert target.bytes == NONE


def test_bytes_on_a_link_end_it_and_so_does_what_is_about_an_engine() -> None:
    with two_ends() as (source, target):
        with pytest.raises(TransferError, match="bytes on a link that carries messages"):
            target.wire._take("prefill-0", FrameKind.DATA, bytearray(8))
        target.wire._take("prefill-0", FrameKind.FENCE, bytearray(b"{}"))
        target.wire.receive()
        assert poll(lambda: target.wire.links["prefill-0"].is_lost and not source.wire.receive())


def test_memory_that_nobody_else_can_map_is_refused() -> None:
    wire = IpcWire(ScopedBackend(EagerBackend(), "prefill-0"))
    with pytest.raises(LayoutMismatch, match="got eager"):
        wire._memory()


# The lanes


def test_works_of_a_lane_run_in_order_and_an_error_ends_it() -> None:
    lane, done = CopyLane("prefill-0>decode-0:async.kv", torch.device("cpu")), []

    def breaks() -> None:
        raise RuntimeError("an illegal access")

    lane.submit(lambda: time.sleep(0.05))
    lane.submit(lambda: done.append(1))
    broken = lane.submit(breaks)
    behind = lane.submit(lambda: done.append(2))
    behind.wait()
    assert done == [1] and broken.is_reached and lane.landing.is_reached
    with pytest.raises(TransferError, match=r"prefill-0>decode-0:async\.kv: a copy failed: an illegal access"):
        lane.submit(lambda: done.append(3))
    lane.close(lambda: done.append(4))
    assert poll(lambda: done == [1, 4])


def test_a_wait_for_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcheck.core.cache.backend.copy_lane.LAND_S", 0.05)
    lane, stop = CopyLane("lane", torch.device("cpu")), threading.Event()
    backend = RegionBackend()
    signal = Signal(lane.submit(lambda: stop.wait()))
    assert not backend.query(signal)
    with pytest.raises(TransferError, match=r"copies have not landed in 0\.05 s"):
        backend.wait(signal)
    stop.set()
    assert poll(lambda: backend.query(signal))
    backend.wait(signal)
