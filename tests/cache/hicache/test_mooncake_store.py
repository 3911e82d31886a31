"""The Mooncake store keeps the contract over a stand-in with the library's measured habits, and over the library."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.store_contract import CONTRACT, KEYS, payload_of

from kvcheck.core.base.errors import StorageError, UnknownVerdict, UsageError
from kvcheck.core.cache.hicache.mooncake_store import MooncakeStore
from kvcheck.core.cache.hicache.storage import STORES, PageStore, object_bytes, pack_object

SEGMENT_BYTES = 16 << 20
REAL = (pytest.mark.mooncake, pytest.mark.processes)
BUFFER_BYTES = 1 << 20
START_S = 20.0


class StandIn:
    """One cluster in a dict: put keeps old bytes and says 0, missing is b"", a lost segment still exists."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.setup_code = 0
        self.lost: set[str] = set()
        self.is_deaf = False  # accepts writes and keeps nothing

    def setup(self, *arguments: object) -> int:
        assert arguments[0] == "127.0.0.1" and arguments[4] == "tcp"
        return self.setup_code

    def put(self, key: str, value: bytes) -> int:
        return 0 if key in self.objects else self.upsert(key, value)

    def upsert(self, key: str, value: bytes) -> int:
        if not 0 < len(value) <= BUFFER_BYTES:
            return -600
        if len(value) + sum(len(data) for other, data in self.objects.items() if other != key) > SEGMENT_BYTES:
            return -200
        if not self.is_deaf:
            self.objects[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return b"" if key in self.lost else self.objects.get(key, b"")

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def remove(self, key: str, force: bool) -> int:
        if key not in self.objects:
            return -704
        if not force:
            return -706
        del self.objects[key]
        return 0

    def close(self) -> int:
        """The library would crash in every later call."""
        self.objects = None  # type: ignore[assignment]
        return 0


@pytest.fixture
def listener() -> Iterator[str]:
    """An address where something listens, for the check that a master is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    cluster = StandIn()
    package, module = types.ModuleType("mooncake"), types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: cluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return cluster


@pytest.fixture
def store(cluster: StandIn, listener: str) -> MooncakeStore:
    return MooncakeStore(listener, buffer_bytes=BUFFER_BYTES)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Master:
    """A master of its own, on free ports, with short leases."""

    def __init__(self, folder: Path) -> None:
        rpc, metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{rpc}"
        self._log = (folder / "master.log").open("wb")
        program = Path(__import__("mooncake").__path__[0], "mooncake_master")
        self.process = subprocess.Popen(
            [
                str(program),
                f"--rpc_port={rpc}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={metrics}",
                "--metrics_host=127.0.0.1",
                "--default_kv_lease_ttl=200",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < end, (folder / "master.log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.address.rpartition(":")[2]))) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"the mooncake transfer engine is installed and cannot be loaded: {error}")
    master = Master(tmp_path_factory.mktemp("master"))
    yield master
    master.stop()


@pytest.fixture(scope="module")
def opened(master: Master) -> Iterator[list[MooncakeStore]]:
    """The store that tests share while nobody closes it: leaving the cluster takes the library seconds."""
    opened: list[MooncakeStore] = []
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def real(master: Master, opened: list[MooncakeStore]) -> MooncakeStore:
    """An empty store that lends a segment."""
    if not opened or opened[-1]._client is None:
        opened.append(MooncakeStore(master.address, segment_bytes=SEGMENT_BYTES, buffer_bytes=BUFFER_BYTES))
    store = opened[-1]
    for key in KEYS:
        store.remove(key)
    store.refused = 0
    return store


def gives_back_the_largest_object_and_refuses_one_byte_more(store: MooncakeStore) -> None:
    largest = BUFFER_BYTES - object_bytes(KEYS[0], 0)
    store.put(KEYS[0], payload_of(0, largest))
    assert store.get(KEYS[0], largest) == payload_of(0, largest)
    with pytest.raises(StorageError, match=f"its buffer holds {BUFFER_BYTES}"):
        store.put(KEYS[1], payload_of(1, largest + 1))


def refuses_damage_and_replaces_it(store: MooncakeStore) -> None:
    """What somebody else put under a key is replaced by a put, though the library keeps old bytes."""
    client = store._client
    assert client is not None
    whole = pack_object(KEYS[0], payload_of(0))
    bad = (whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1]), pack_object(KEYS[1], payload_of(0)), b"?")
    for count, data in enumerate(bad):
        assert client.upsert(KEYS[0], data) == 0
        assert client.put(KEYS[0], whole) == 0 and client.get(KEYS[0]) == data  # the habit itself
        assert store.get(KEYS[0], 3000) is None and store.refused == count + 1
        store.put(KEYS[0], payload_of(0))
        assert store.get(KEYS[0], 3000) == payload_of(0)


def gives_exact_bytes_when_it_is_full(store: MooncakeStore) -> None:
    size = 1_000_000
    kept = refusals = 0
    for number, key in enumerate(KEYS):
        try:
            store.put(key, payload_of(number, size))
            kept += 1
        except StorageError as error:
            assert "full" in str(error)
            refusals += 1
    found = [store.get(key, size) for key in KEYS]
    assert kept and (refusals or None in found)
    assert any(found) and all(data in (None, payload_of(number, size)) for number, data in enumerate(found))
    assert store.refused == 0


LIMITS = (
    gives_back_the_largest_object_and_refuses_one_byte_more,
    refuses_damage_and_replaces_it,
    gives_exact_bytes_when_it_is_full,
)


@pytest.mark.parametrize("kind", ["store", pytest.param("real", marks=REAL)])
@pytest.mark.parametrize("promise", [*CONTRACT, *LIMITS], ids=lambda promise: promise.__name__)
def test_the_stand_in_and_the_library_keep_the_contract(
    kind: str, promise: Callable[[PageStore], None], request: pytest.FixtureRequest
) -> None:
    promise(request.getfixturevalue(kind))


@pytest.mark.mooncake
@pytest.mark.processes
def test_two_clients_see_one_store(real: MooncakeStore, master: Master) -> None:
    other = MooncakeStore(master.address, buffer_bytes=BUFFER_BYTES)
    other.put(KEYS[0], payload_of(0))
    assert real.get(KEYS[0], 3000) == payload_of(0)
    real.put(KEYS[0], payload_of(1))
    assert other.get(KEYS[0], 3000) == payload_of(1)
    other.close()
    assert real.get(KEYS[0], 3000) == payload_of(1)  # it lent no segment, so it took nothing away


@pytest.mark.mooncake
@pytest.mark.processes
@pytest.mark.usefixtures("master")  # its skip where the library cannot be loaded
def test_a_master_that_dies_is_told(tmp_path: Path) -> None:
    """In a process of its own: the library takes seconds to let go of a dead master."""
    master = Master(tmp_path)
    script = (
        "import os, sys\n"
        "from kvcheck.core.base.errors import StorageError\n"
        "from kvcheck.core.cache.hicache.mooncake_store import MooncakeStore\n"
        f"store = MooncakeStore({master.address!r}, segment_bytes={SEGMENT_BYTES})\n"
        f"store.put({KEYS[0]!r}, b'x' * 100)\n"
        f"os.kill({master.process.pid}, 9)\n"
        "told = []\n"
        f"for call in (lambda: store.put({KEYS[1]!r}, b'y'), lambda: store.get({KEYS[0]!r}, 100),\n"
        f"             lambda: store.contains({KEYS[0]!r}), lambda: store.remove({KEYS[0]!r})):\n"
        "    try:\n"
        "        told.append(repr(call()))\n"
        "    except StorageError as error:\n"
        "        told.append(type(error).__name__)\n"
        "print('TOLD', *told, flush=True)\n"
        "os._exit(0)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=90,
            cwd=Path(__file__).parents[3],
        )
    finally:
        master.stop()
    assert "TOLD StorageError StorageError StorageError StorageError" in done.stdout, done.stdout + done.stderr


def test_a_lost_segment_is_absent_though_the_master_believes_in_it(store: MooncakeStore, cluster: StandIn) -> None:
    store.put(KEYS[0], payload_of(0))
    cluster.lost.add(KEYS[0])
    assert store.contains(KEYS[0])
    assert store.get(KEYS[0], 3000) is None and store.refused == 0
    with pytest.raises(StorageError, match="does not give them back"):
        store.put(KEYS[0], payload_of(0))


def test_a_success_code_is_not_believed(store: MooncakeStore, cluster: StandIn) -> None:
    cluster.is_deaf = True
    with pytest.raises(StorageError, match="does not give them back"):
        store.put(KEYS[0], payload_of(0))


def test_without_a_master_nothing_falls_back(cluster: StandIn) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnknownVerdict, match=f"master at {address}"):
        STORES.load("mooncake")(address)


def test_a_master_that_refuses_is_unknown(cluster: StandIn, listener: str) -> None:
    cluster.setup_code = -1
    with pytest.raises(UnknownVerdict, match="setup returned -1"):
        MooncakeStore(listener)


def test_without_the_library_nothing_falls_back(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UnknownVerdict, match="next: pip install"):
        MooncakeStore(listener)


@pytest.mark.parametrize("address", ["", "localhost", "host:", ":1", "host:0", "host:65536", "host:1/x", "a b:1"])
def test_an_address_that_is_none_is_a_usage_error(address: str) -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        MooncakeStore(address)
