"""The engine process and its shared memory, with a stand-in for the library: failures, silences and deaths."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.live_processes import SOON_S, is_alive, poll, shared_files

from kvcheck.core.base.errors import TransferError, UnknownVerdict, UsageError
from kvcheck.core.cache.backend.shared_memory import RegionHandle, SharedRegion
from kvcheck.core.cache.transfer.mooncake.engine import CALLS_AHEAD, MooncakeEngine, PeerInfo
from kvcheck.core.cache.transfer.mooncake.library import OLDEST, EngineSettings
from kvcheck.core.cache.transfer.mooncake.plan import ENTRIES_OF_A_CALL, BlockBatch

PROJECT = Path(__file__).parents[3]
SMALL = 1 << 16

# Codes and accidents by the host that a peer's session names; every call is written down.
STAND_IN = f"""
import os, time
SUPPORT_INTRA_NVLINK = False
class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        assert metadata == "P2PHANDSHAKE" and device == ""
        assert os.environ["MC_LOG_LEVEL"] == "ERROR" and "MC_STRANGER" not in os.environ
        return -7 if host == "refuse" else 0
    def get_rpc_port(self):
        return 15000
    def register_memory(self, address, size):
        return -200 if size == {SMALL + 1} else 0
    def batch_transfer_sync_write(self, peer, local, remote, length):
        assert 0 < len(local) == len(remote) == len(length)
        with open(os.environ["MC_STAND_IN_LOG"], "a") as log:
            log.write(f"{{peer}} {{len(local)}} {{sum(length)}}\\n")
        what = peer.partition(":")[0]
        if what == "crash":
            os.abort()
        if what == "hang":
            time.sleep(600)
        return -1 if what == "fail" else 0
"""


SLOW = "import time; time.sleep(600)"


def scattered(count: int, size: int = 8) -> BlockBatch:
    at = np.arange(count, dtype=np.int64) * size * 2
    return BlockBatch("kv", "kv", np.stack((at, at, np.full(count, size)), axis=1))


def peer(what: str) -> PeerInfo:
    return PeerInfo(f"{what}:15000", {"kv": (1 << 40, 1 << 30)})


def installed_version(build: str) -> str:
    """One build is installed, the oldest that will do."""
    if build == "mooncake-transfer-engine":
        return OLDEST
    raise importlib.metadata.PackageNotFoundError(build)


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion("kv", SMALL) as region:
        yield region


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """The stand-in in the library's place, for the engine processes of one test."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MC_STRANGER", "1")
    monkeypatch.setattr(importlib.metadata, "version", installed_version)
    return EngineSettings(call_s=SOON_S, variables=(("MC_STAND_IN_LOG", str(tmp_path / "calls")),))


@pytest.fixture
def engine(region: SharedRegion, settings: EngineSettings) -> Iterator[MooncakeEngine]:
    with MooncakeEngine({"kv": region}, settings=settings) as engine:
        yield engine


def test_regions_are_shared_and_sealed() -> None:
    with SharedRegion("kv", 100) as mine:
        assert torch.equal(mine.bytes_view(), torch.zeros(100, dtype=torch.uint8))
        other = SharedRegion.attach(mine.handle)
        mine.bytes_view()[7] = 9
        assert other.bytes_view()[7] == 9 and other.size_bytes == 100
        with pytest.raises(OSError):
            os.ftruncate(other.fileno(), 10)
        kept = other.bytes_view()
        other.close()
        other.close()
    kept[8] = 3
    assert kept[7:9].tolist() == [9, 3]
    for call in (mine.bytes_view, mine.fileno):
        with pytest.raises(TransferError, match="shared region kv is closed"):
            call()


def test_a_handle_names_one_region_only() -> None:
    with SharedRegion("kv", 100) as mine, SharedRegion("other", 100) as other:
        stale = replace(mine.handle, descriptor=other.fileno())
        with pytest.raises(TransferError, match=r"kv of process .* is gone: expected inode"):
            SharedRegion.attach(stale)
        gone = mine.handle
    with pytest.raises(TransferError, match="is gone"):
        SharedRegion.attach(gone)
    with pytest.raises(TransferError, match="is gone"):
        SharedRegion.attach(RegionHandle(name="kv", pid=2**30, descriptor=3, inode=1, size_bytes=100))


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [
        *((name, size, UsageError) for name, size in (("", 8), ("a/b", 8), ("kv", 0), ("kv", -1))),
        ("kv", 1 << 60, TransferError),  # more memory than there can be
    ],
)
def test_regions_that_cannot_be(name: str, size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        SharedRegion(name, size)


@pytest.mark.processes
def test_calls_are_cut_and_in_order(engine: MooncakeEngine, tmp_path: Path) -> None:
    assert engine.session == "127.0.0.1:15000" and engine.version == OLDEST
    assert {name: size for name, (_, size) in engine.info.regions.items()} == {"kv": SMALL}
    assert engine.write(peer("ok"), [scattered(3000)]) == 24000
    assert engine.write(peer("two"), [scattered(0)]) == 0
    assert engine.write(peer("three"), [scattered(1, 64)]) == 64
    sizes = [ENTRIES_OF_A_CALL, ENTRIES_OF_A_CALL, 3000 - 2 * ENTRIES_OF_A_CALL]
    expected = [f"ok:15000 {size} {size * 8}" for size in sizes] + ["three:15000 1 64"]
    assert (tmp_path / "calls").read_text().splitlines() == expected
    outside = BlockBatch("kv", "kv", np.array([[SMALL - 4, 0, 8]], dtype=np.int64))
    with pytest.raises(TransferError, match="not inside local region kv"):
        engine.write(peer("ok"), [scattered(2), outside])
    assert not engine.is_poisoned and (tmp_path / "calls").read_text().splitlines() == expected


@pytest.mark.processes
def test_writes_can_be_submitted_ahead(engine: MooncakeEngine, tmp_path: Path) -> None:
    submissions = [engine.submit(peer("ok"), [scattered(number + 1)]) for number in range(CALLS_AHEAD * 3)]
    assert engine.wait(submissions[-1]) == CALLS_AHEAD * 3 * 8
    assert all(
        engine.is_done(submission) and engine.wait(submission) == submission.size_bytes for submission in submissions
    )
    counts = [int(line.split()[1]) for line in (tmp_path / "calls").read_text().splitlines()]
    assert counts == list(range(1, CALLS_AHEAD * 3 + 1))
    late = engine.submit(peer("ok"), [scattered(2000)])
    assert poll(lambda: engine.is_done(late))


@pytest.mark.processes
def test_a_failed_call_poisons_until_the_fence(
    engine: MooncakeEngine, region: SharedRegion, settings: EngineSettings, tmp_path: Path
) -> None:
    submissions = [engine.submit(peer(what), [scattered(1)]) for what in ("ok", "fail", "ok", "ok", "ok", "ok", "ok")]
    engine.wait(submissions[0])
    with pytest.raises(TransferError, match=r"returned -1, expected 0, in write 2; .*stay in use until both"):
        engine.wait(submissions[-1])
    for call in (
        lambda: engine.wait(submissions[2]),
        lambda: engine.is_done(submissions[3]),
        lambda: engine.write(peer("ok"), [scattered(1)]),
    ):
        with pytest.raises(TransferError, match=r"no more writes.*returned -1"):
            call()
    assert engine.wait(submissions[0]) == 8
    assert engine.is_poisoned and not engine.is_fenced and is_alive(engine.pid)
    engine.fence()
    engine.fence()
    assert engine.is_fenced and not is_alive(engine.pid)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # nothing after the one that failed
    with MooncakeEngine({"kv": region}, settings=settings) as after:
        assert after.write(peer("ok"), [scattered(1)]) == 8


@pytest.mark.processes(starts=True)
def test_a_crash_is_told_with_its_signal_and_words(engine: MooncakeEngine) -> None:
    with pytest.raises(TransferError, match=r"(?s)ended by signal SIGABRT in write 1;.*it printed: .*Fatal Python"):
        engine.write(peer("crash"), [scattered(1)])
    assert engine.is_poisoned and engine.is_fenced  # its process is gone


@pytest.mark.processes
def test_silence_ends_with_the_watchdog(region: SharedRegion, settings: EngineSettings) -> None:
    with MooncakeEngine({"kv": region}, settings=replace(settings, call_s=0.3)) as engine:
        start = time.monotonic()
        with pytest.raises(TransferError, match=r"gave no answer within 0.3 s in write 1"):
            engine.write(peer("hang"), [scattered(1)])
        assert time.monotonic() - start < SOON_S
        assert engine.is_poisoned and not engine.is_fenced
        engine.fence()
        assert engine.is_fenced
        other = MooncakeEngine({"kv": region}, settings=replace(settings, call_s=0.3))
        submission = other.submit(peer("hang"), [scattered(1)])
        with pytest.raises(TransferError, match="gave no answer"):
            poll(lambda: other.is_done(submission))
        other.fence()


@pytest.mark.processes
def test_a_fence_ends_the_wait_of_another_thread(engine: MooncakeEngine) -> None:
    submission = engine.submit(peer("hang"), [scattered(1)])
    told: list[str] = []

    def wait() -> None:
        try:
            engine.wait(submission)
        except TransferError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    engine.fence()
    thread.join(SOON_S)
    assert len(told) == 1 and ("SIGKILL" in told[0] or "fenced" in told[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "given", "error", "message"),
    [
        (STAND_IN, {"host": "refuse"}, TransferError, "initialize for protocol tcp at refuse returned -7"),
        (STAND_IN, {"network": "/nowhere"}, TransferError, "could not enter the network of its run at /nowhere"),
        (STAND_IN, {"protocol": "nvlink_intra"}, UnknownVerdict, "the installed build is without it"),
        ("raise ImportError('libnuma.so.1')", {}, UnknownVerdict, r"could not be loaded: libnuma.so.1.*next: pip"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, TransferError, "ended by signal SIGSEGV"),
        (SLOW, {}, TransferError, r"is not ready after 0.5 s"),
    ],
)
def test_an_engine_that_does_not_come_up(
    source: str,
    given: dict[str, Any],
    error: type[Exception],
    message: str,
    region: SharedRegion,
    settings: EngineSettings,
    tmp_path: Path,
) -> None:
    (tmp_path / "mooncake" / "engine.py").write_text(source)
    start_s = 0.5 if source == SLOW else settings.start_s
    with pytest.raises(error, match=message):
        MooncakeEngine({"kv": region}, settings=replace(settings, start_s=start_s), **given)


@pytest.mark.processes
def test_a_region_that_cannot_be_registered_is_named(settings: EngineSettings) -> None:
    with SharedRegion("odd", SMALL + 1) as odd, pytest.raises(TransferError, match=r"registering region odd.*-200"):
        MooncakeEngine({"odd": odd}, settings=settings)


@pytest.mark.processes(starts=True)
def test_an_engine_outlives_the_thread_that_started_it(region: SharedRegion, settings: EngineSettings) -> None:
    started: list[MooncakeEngine] = []
    thread = threading.Thread(target=lambda: started.append(MooncakeEngine({"kv": region}, settings=settings)))
    thread.start()
    thread.join(SOON_S)
    with started[0] as engine:
        assert engine.write(peer("ok"), [scattered(1)]) == 8


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize("what", ["ok", "hang"])
@pytest.mark.usefixtures("settings")
def test_an_engine_dies_with_its_worker(what: str, tmp_path: Path) -> None:
    """Killed while idle, and in the middle of a call; no memory is left behind either way."""
    script = (
        "import importlib.metadata, time\n"
        f"from {__name__} import *\n"
        "importlib.metadata.version = installed_version\n"
        "region = SharedRegion('kv', SMALL)\n"
        f"variables = (('MC_STAND_IN_LOG', {str(tmp_path / 'calls')!r}),)\n"
        "engine = MooncakeEngine({'kv': region}, settings=EngineSettings(variables=variables))\n"
        f"engine.submit(peer({what!r}), [scattered(1)])\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    tests = os.pathsep.join(map(str, (tmp_path, PROJECT, Path(__file__).parents[2])))
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": tests},
    ) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert is_alive(pid) and poll((tmp_path / "calls").exists)
        memory = shared_files(worker.pid) | shared_files(pid)
        os.kill(worker.pid, signal.SIGKILL)
        assert poll(lambda: not is_alive(pid))
    assert any("kvcheck-kv" in name for name in memory)
    assert not [name for name in memory if os.path.exists(name)]


@pytest.mark.processes(starts=True)
def test_the_engine_process_loads_no_tensor_library() -> None:
    script = (
        "import sys, kvcheck.core.cache.transfer.mooncake.child; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PROJECT, timeout=60)
    assert done.stdout == "False False\n", done.stderr
