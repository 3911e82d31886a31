"""The transfer engine over the real library: bytes at the receiver, dead and silent peers, fences."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.live_processes import is_alive, poll, shared_files

from kvcheck.core.base.errors import TransferError, UnknownVerdict
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion
from kvcheck.core.cache.transfer.mooncake.engine import MooncakeEngine, PeerInfo
from kvcheck.core.cache.transfer.mooncake.library import EngineSettings
from kvcheck.core.cache.transfer.mooncake.plan import BlockBatch

pytestmark = [pytest.mark.mooncake, pytest.mark.processes]

KV_BYTES, STATE_BYTES = 8 << 20, 1 << 20
PROJECT = Path(__file__).parents[3]
LARGE = 64 << 20
UNTOUCHED = 0xA5
QUICK = EngineSettings(transfer_s=5)
PATIENT = EngineSettings(transfer_s=5, progress_s=60, status_s=60)  # a call ends long before its connections do
BOUND_S = 30.0
LANDING_S = 3.0


class Side:
    """Two regions, and an engine over them."""

    def __init__(self, kv_bytes: int = KV_BYTES) -> None:
        self.regions = {"kv": SharedRegion("kv", kv_bytes), "state": SharedRegion("state", STATE_BYTES)}
        self.engine = self.start()

    def start(self, settings: EngineSettings = QUICK) -> MooncakeEngine:
        self.engine = MooncakeEngine(self.regions, settings=settings)
        return self.engine

    def fill(self, value: int | torch.Generator) -> None:
        """One value everywhere, or drawn bytes."""
        for region in self.regions.values():
            if isinstance(value, int):
                region.bytes_view().fill_(value)
            else:
                region.bytes_view().random_(0, 256, generator=value)

    def close(self) -> None:
        self.engine.fence()
        for region in self.regions.values():
            region.close()


@pytest.fixture(scope="module", autouse=True)
def loadable() -> None:
    """A skip, with the reason, where the library is installed and will not do."""
    try:
        with SharedRegion("kv", 64) as region, MooncakeEngine({"kv": region}):
            pass
    except UnknownVerdict as error:
        pytest.skip(str(error))


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:

        def make(**sizes: int) -> Side:
            side = Side(**sizes)
            stack.callback(side.close)
            return side

        yield make


def random_blocks(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """[count, 3]: disjoint targets in any order, some of them touching, and sources anywhere."""
    edges = np.sort(random.choice(size + 1, count + 1, replace=False))
    length = np.minimum(np.diff(edges), random.integers(1, 1 << 14, count))
    is_whole = random.random(count) < 0.3  # up to the next one, so that neighbours touch
    length = np.where(is_whole & (np.diff(edges) < 1 << 14), np.diff(edges), length)
    source = np.where(random.random(count) < 0.5, edges[:-1], random.integers(0, size - length + 1))
    source = np.minimum(source, size - length)
    rows = np.stack((source, edges[:-1], length), axis=1).astype(np.int64)
    return rows[random.permutation(count)]


def check_arrived(source: Side, target: Side, batches: list[BlockBatch]) -> int:
    """Every region of the target is as it should be; returns the bytes that were moved."""
    moved = 0
    for name, region in target.regions.items():
        expected = torch.full((region.size_bytes,), UNTOUCHED, dtype=torch.uint8)
        for batch in batches:
            for start, stop, size in batch.blocks.tolist() if batch.remote == name else ():
                expected[stop : stop + size] = source.regions[batch.local].bytes_view()[start : start + size]
                moved += size
        assert torch.equal(region.bytes_view(), expected)
    return moved


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_between_two_engines(make: Callable[..., Side], seed: int) -> None:
    random = np.random.default_rng(seed)
    upper_half = np.array([[0, STATE_BYTES // 2, 0]])
    prefill, decode = make(), make()
    for source, target in ((prefill, decode), (decode, prefill)):
        for count in (1, 30, 2500):
            source.fill(torch.Generator().manual_seed(seed))
            target.fill(UNTOUCHED)
            batches = [
                BlockBatch("kv", "kv", random_blocks(random, KV_BYTES, count)),
                BlockBatch("kv", "state", random_blocks(random, STATE_BYTES // 2, count)),
                BlockBatch("state", "state", random_blocks(random, STATE_BYTES // 2, 7) + upper_half),
            ]
            assert source.engine.write(target.engine.info, batches) == check_arrived(source, target, batches)


def whole(size: int = 64) -> list[BlockBatch]:
    """The first bytes of "kv", to the same place."""
    return [BlockBatch("kv", "kv", np.array([[0, 0, size]], dtype=np.int64))]


def test_many_small_entries_do_not_wedge_the_peer(make: Callable[..., Side]) -> None:
    """5,000 entries that nothing can merge: in one call of the library they would fail, and again wedge the peer."""
    prefill, decode = make(), make()
    at = np.arange(5000, dtype=np.int64) * 128
    batch = BlockBatch("kv", "kv", np.stack((at, at[::-1], np.full(5000, 64)), axis=1))
    for seed in range(3):
        prefill.fill(torch.Generator().manual_seed(seed))
        decode.fill(UNTOUCHED)
        assert prefill.engine.write(decode.engine.info, [batch]) == check_arrived(prefill, decode, [batch]) == 320_000


def test_out_of_range_is_refused_before_the_engine(make: Callable[..., Side]) -> None:
    prefill, decode = make(), make()
    decode.fill(UNTOUCHED)
    inside = whole(4096)
    outside = BlockBatch("kv", "state", np.array([[0, STATE_BYTES - 4095, 4096]], dtype=np.int64))
    with pytest.raises(TransferError, match="not inside remote region state"):
        prefill.engine.write(decode.engine.info, [*inside, outside])
    check_arrived(prefill, decode, [])
    assert prefill.engine.write(decode.engine.info, inside) == check_arrived(prefill, decode, inside)


def test_a_wrong_address_fails_the_write_and_no_process(make: Callable[..., Side]) -> None:
    """A peer that hands out addresses it never registered."""
    prefill, decode = make(), make()
    decode.fill(UNTOUCHED)
    real = decode.engine.info
    wrong = PeerInfo(real.session, {"kv": (real.regions["kv"][0] + KV_BYTES, 4096)})
    with pytest.raises(TransferError, match="returned -1"):
        prefill.engine.write(wrong, whole())
    check_arrived(prefill, decode, [])
    assert not decode.engine.is_fenced
    prefill.engine.fence()
    assert prefill.start().write(real, whole()) == check_arrived(prefill, decode, whole())


def test_a_peer_that_says_nothing_is_given_up(make: Callable[..., Side]) -> None:
    """Its kernel accepts the connection, and nobody answers: the library alone would wait for a minute."""
    prefill = make()
    prefill.engine.fence()
    engine = MooncakeEngine(prefill.regions, settings=replace(QUICK, call_s=2.0))
    with engine, socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        peer = PeerInfo(f"127.0.0.1:{server.getsockname()[1]}", {"kv": (1 << 40, KV_BYTES)})
        with pytest.raises(TransferError, match="gave no answer within"):
            engine.write(peer, whole())
        assert 2.0 <= time.monotonic() - start < BOUND_S
        assert engine.is_poisoned and not engine.is_fenced


def frozen_write(prefill: Side, decode: Side) -> Callable[[], int]:
    """A write that is in flight while the peer's engine process stands still; the result waits for it."""
    prefill.engine.write(decode.engine.info, whole())
    os.kill(decode.engine.pid, signal.SIGSTOP)
    submission = prefill.engine.submit(decode.engine.info, whole(LARGE))
    assert not prefill.engine.is_done(submission)
    return lambda: prefill.engine.wait(submission)


def check_goes_on(prefill: Side, decode: Side) -> None:
    """Engines that are started again over the same memory."""
    decode.fill(UNTOUCHED)
    prefill.fill(torch.Generator().manual_seed(2))
    moved = prefill.start().write(decode.start().info, whole(LARGE))
    assert moved == check_arrived(prefill, decode, whole(LARGE))


def test_a_peer_killed_in_the_middle(make: Callable[..., Side]) -> None:
    prefill, decode = make(kv_bytes=LARGE), make(kv_bytes=LARGE)
    wait = frozen_write(prefill, decode)
    decode.engine.fence()
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"returned -1.*stay in use"):
        wait()
    assert time.monotonic() - start < BOUND_S
    assert prefill.engine.is_poisoned and not prefill.engine.is_fenced
    prefill.engine.fence()
    check_goes_on(prefill, decode)


def test_an_engine_killed_in_the_middle(make: Callable[..., Side]) -> None:
    prefill, decode = make(kv_bytes=LARGE), make(kv_bytes=LARGE)
    wait = frozen_write(prefill, decode)
    os.kill(prefill.engine.pid, signal.SIGKILL)
    with pytest.raises(TransferError, match="ended by signal SIGKILL"):
        wait()
    assert prefill.engine.is_fenced
    prefill.engine.fence()
    os.kill(decode.engine.pid, signal.SIGCONT)
    decode.engine.fence()  # what was on its way may still land before this
    check_goes_on(prefill, decode)


def test_after_the_fence_no_later_byte_arrives(make: Callable[..., Side]) -> None:
    """The library fails the call to a frozen peer and goes on reading the source: until its process is gone."""
    prefill, decode = make(kv_bytes=LARGE), make(kv_bytes=LARGE)
    prefill.engine.fence()
    prefill.start(PATIENT)
    prefill.fill(1)
    decode.fill(UNTOUCHED)
    wait = frozen_write(prefill, decode)
    with pytest.raises(TransferError, match="returned -1"):
        wait()
    prefill.engine.fence()
    prefill.fill(2)
    os.kill(decode.engine.pid, signal.SIGCONT)
    view = decode.regions["kv"].bytes_view()
    end = time.monotonic() + LANDING_S
    while time.monotonic() < end:
        assert int(view.eq(2).sum()) == 0
    landed = int(view.eq(1).sum())
    assert landed > 64  # what was on its way when the process ended does land: the peer's memory needs its own fence


def test_memory_is_not_left_behind(tmp_path: Path) -> None:
    """A worker killed with its engine running: another process that mapped the region keeps it, no name remains."""
    script = (
        "import dataclasses, json, time\n"
        "from kvcheck.core.cache.transfer.mooncake.engine import MooncakeEngine\n"
        "from kvcheck.core.cache.backend.shared_memory import SharedRegion\n"
        "region = SharedRegion('kv', 1 << 20)\n"
        "engine = MooncakeEngine({'kv': region})\n"
        "told = engine.pid, engine.session, engine.regions(), dataclasses.asdict(region.handle)\n"
        "print(json.dumps(told), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        pid, session, regions, handle = json.loads(worker.stdout.readline())
        peer = PeerInfo(session, {name: (at, size) for name, (at, size) in regions.items()})
        with SharedRegion.attach(RegionHandle(**handle)) as theirs, SharedRegion("kv", 1 << 20) as mine:
            mine.bytes_view().fill_(7)
            batch = BlockBatch("kv", "kv", np.array([[0, 64, 4096]], dtype=np.int64))
            with MooncakeEngine({"kv": mine}, settings=QUICK) as engine:
                engine.write(peer, [batch])
                assert theirs.bytes_view()[64 : 64 + 4096].eq(7).all() and int(theirs.bytes_view().sum()) == 7 * 4096
                memory = shared_files(worker.pid) | shared_files(pid)
                os.kill(worker.pid, signal.SIGKILL)
                worker.wait(BOUND_S)
                assert poll(lambda: not is_alive(pid))
                with pytest.raises(TransferError, match="returned -1"):
                    engine.write(peer, [batch])
    assert any("kvcheck-kv" in name for name in memory)
    assert not [name for name in memory if os.path.exists(name)]
