"""Temporary folders and the private network of processes that kvcheck starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcheck.core.base import private_network as module
from kvcheck.core.base import scratch
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.private_network import PrivateNetwork
from kvcheck.core.base.scratch import ScratchFolder, sweep
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.mooncake_cell import exposure

PLAN = Plan(scenario="pd-transfer", shape="llama-3-tiny", backend="eager", transport="mooncake", ranks="1x1")
LISTEN = """
import socket, sys
from kvcheck.core.base.private_network import enter
enter(sys.argv[1])
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.readline()
"""
CONNECT = """
import socket, sys
from kvcheck.core.base.private_network import enter
enter(sys.argv[1])
socket.create_connection(("127.0.0.1", int(sys.argv[2])), 5).close()
print([name for _, name in socket.if_nameindex()])
"""


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    with PrivateNetwork() as made:
        if made.path is None:
            pytest.skip(made.why)
        yield made


@pytest.mark.processes
def test_what_listens_on_all_interfaces_is_reached_from_within_alone(network: PrivateNetwork) -> None:
    path = str(network.path)
    assert exposure(PLAN) == []
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listening:
        assert listening.stdin is not None and listening.stdout is not None
        port = int(listening.stdout.readline())
        with open("/proc/net/tcp", encoding="ascii") as table:
            assert f":{port:04X} 00000000:0000 0A" not in table.read()
        within = subprocess.run(
            [sys.executable, "-c", CONNECT, path, str(port)], capture_output=True, text=True, check=True
        )
        assert within.stdout == "['lo']\n"
        listening.stdin.write("\n")


@pytest.mark.processes(starts=True)
def test_it_ends_with_its_holder(network: PrivateNetwork) -> None:
    holder = network._holder
    assert holder is not None
    network.close()
    assert network.path is None and holder.returncode is not None


@pytest.mark.processes
def test_a_root_without_rights_on_networks_has_one_of_its_own_users(network: PrivateNetwork) -> None:
    within = [sys.executable, "-m", "kvcheck.core.base.private_network"]
    found = subprocess.run(["setpriv", "--bounding-set=-net_admin", *within], input="", capture_output=True, text=True)
    if found.stderr:
        pytest.skip(found.stderr)
    assert found.stdout == f"{module.READY}\n"


def refused(*_: object, **__: object) -> None:
    raise UnknownVerdict("no process here")


def test_a_system_that_makes_none_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start", refused)
    with PrivateNetwork() as network:
        assert (network.path, network.why) == (None, "no process here")
    (text,) = exposure(PLAN)
    assert "listens on all interfaces" in text and "no process here" in text


def test_the_holder_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def forbidden(name: str, *_: int) -> None:
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(module, "_call", forbidden)
    module.main()
    assert capsys.readouterr().out == "the system refuses a network namespace (unshare: Operation not permitted)\n"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for memory, beside the usual one for temporary files."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(scratch, "MEMORY", folder)
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "usual"))
    (tmp_path / "usual").mkdir()
    monkeypatch.setattr(scratch, "USUAL", (str(tmp_path / "usual"),))
    return folder


def parent(kind: str) -> Path:
    with ScratchFolder(kind) as folder:
        return folder.path.parent


def test_stores_lie_in_memory_with_room_and_other_folders_do_not(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (parent("store"), parent("ranks")) == (memory, tmp_path / "usual")
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1 << 60)
    assert parent("store") == tmp_path / "usual"
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1)
    monkeypatch.setattr(scratch, "MEMORY", tmp_path / "missing")
    assert parent("store") == tmp_path / "usual"
    monkeypatch.setattr(scratch, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert parent("store") == tmp_path, "a folder that was named is used"


def test_stores_of_dead_runs_are_removed_from_memory_too(memory: Path) -> None:
    left = memory / "kvcheck-store-abcdefgh"
    left.mkdir(mode=0o700)
    with ScratchFolder("store") as held:
        assert sweep().removed == (str(left),)
        assert held.path.exists() and not left.exists()
