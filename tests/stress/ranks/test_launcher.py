"""Ranks on several machines, on this one: under torchrun itself, and with agents as threads that share a store.

Invariants:
- What the supervisor learns of a rank under an agent is what it learns of its own child.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from stress.ranks.test_real_processes import PLAN, TroubledSupervisor, importable, outcome
from torch._C._distributed_c10d import TCPStore

from kvcheck.commands.torchrun import find_place
from kvcheck.core.base.errors import TransferError, UsageError
from kvcheck.core.cache.transfer.sockets.link import Listener, connect
from kvcheck.core.stress.ranks import agent_launcher
from kvcheck.core.stress.ranks.agent_launcher import Address, AgentLauncher, Mailbox, RemoteChild, run_agent
from kvcheck.core.stress.ranks.spec import RankSpec
from kvcheck.core.stress.schedule import Plan

__all__ = ["importable"]


def place_of(store: TCPStore, rank: int, world: int) -> Address:
    """A place on this machine."""
    return Address(
        rank=rank, world=world, store_host="127.0.0.1", store_port=store.port, is_host=False, bind="127.0.0.1"
    )


@contextmanager
def launched(world: int) -> Iterator[AgentLauncher]:
    """A supervisor's launcher, with an agent in a thread for each place."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [
        Thread(target=run_agent, args=(place_of(store, rank, world), "rigs.troubled_rank")) for rank in range(world)
    ]
    for agent in agents:
        agent.start()
    made = AgentLauncher(place_of(store, 0, world))
    try:
        yield made
    finally:
        made.dismiss()
        for agent in agents:
            agent.join(30)
    assert not any(agent.is_alive() for agent in agents)


@pytest.mark.processes
def test_a_rank_that_dies_under_an_agent_is_told_of_and_started_again() -> None:
    plan = replace(PLAN, ranks="1x1")
    with launched(2) as launcher:
        supervisor = TroubledSupervisor(
            plan,
            extra={"decode-0": {"die": {"at": "receive", "number": 6}}},
            silence_s=60,
            restarts=("decode-0",),
            launcher=launcher,
        )
        judged = outcome(supervisor, plan, troubled=frozenset({"decode-0"}), has_pids=False)
        assert judged.findings == () and judged.verified == judged.expected > 0
        assert supervisor.reports["decode-0"].lives == ["decode-0 ended by signal 9"]
        assert supervisor.reports["prefill-0"].rejoined == ["decode-0.2"]


@pytest.mark.processes
def test_torchrun_starts_a_rank_each_and_the_first_one_judges(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "kvcheck", "stress", "pd-transfer", "--transport", "tcp", "--ranks", "1x1", "--seed", "5"]
    command += ["--shape", "llama-3-tiny", "--requests", "6", "--no-reports", "--out", str(tmp_path)]
    command += ["--bind", "auto"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("1x1 processes over tcp") == 1, "the other process prints nothing"
    (record,) = tmp_path.glob("*/run.json")
    made = json.loads(record.read_text())
    assert made["verdict"] == "pass" and made["evidence"]["requests"] == 6


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
FOUR = Plan(scenario="", shape="", backend="eager", transport="tcp", ranks="2x2")


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_place_comes_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TORCHRUN)
    place = Address(rank=1, world=4, store_host="localhost", store_port=29500, is_host=False, bind="127.0.0.1")
    assert find_place(FOUR, "127.0.0.1") == place
    assert find_place(FOUR, "10.0.0.7") == replace(place, bind="10.0.0.7")
    assert find_place(FOUR, "auto") == place, "the way to localhost begins there"
    put(monkeypatch, TORCHRUN | {"RANK": "0"})
    assert find_place(FOUR, "127.0.0.1") == replace(place, rank=0, is_host=True)
    put(monkeypatch, TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert find_place(FOUR, "127.0.0.1") == replace(place, rank=0)
    assert find_place(replace(FOUR, transport="loopback"), "127.0.0.1") is None
    put(monkeypatch, {name: value for name, value in TORCHRUN.items() if name != "RANK"})
    assert find_place(FOUR, "127.0.0.1") is None


@pytest.mark.parametrize(
    ("variables", "bind", "text"),
    [
        (TORCHRUN | {"WORLD_SIZE": "3"}, "127.0.0.1", "needs 4 processes, and this is number 1 of 3"),
        (TORCHRUN | {"RANK": "4"}, "127.0.0.1", "number 4 of 4"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "127.0.0.1", "MASTER_PORT: expected a number, got 'x'"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "127.0.0.1", "MASTER_PORT: expected a port from 1 to 65535, got 65536"),
        ({}, "10.0.0.7", "expected a run under torchrun"),
        ({}, "auto", "expected a run under torchrun"),
        (TORCHRUN | {"MASTER_ADDR": "no-such-host.invalid"}, "auto", "name an address of this machine"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], bind: str, text: str
) -> None:
    put(monkeypatch, variables)
    with pytest.raises(UsageError, match=text):
        find_place(FOUR, bind)


def test_lines_of_a_mailbox_come_once_and_in_order() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = Mailbox(store, "box"), Mailbox(place_of(store, 1, 2).connect(), "box")
    for number in range(3):
        ours.send({"n": number})
    assert [theirs.take() for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert theirs.take(0.05) is None and Mailbox(store, "other").take(0.05) is None
    assert not store.check(["kvcheck/box/0"]), "what was taken is not kept"


def test_an_agent_that_does_not_answer_is_a_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_launcher, "ANSWER_S", 0.2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = RankSpec(line="", end="decode", rank=0, prefill=1, decode=1, key="", meeting="", patience_s=1, lease_s=1.0)
    ending = RemoteChild(spec, Mailbox(store, "nobody")).wait(within_s=0.0)
    assert (ending.code, ending.text) == (1, "the agent of decode-0 does not answer")


def test_a_rank_listens_where_it_is_told_and_nowhere_else() -> None:
    with pytest.raises(TransferError, match=r"cannot listen at 203\.0\.113\.1"):
        Listener("203.0.113.1")  # an address for documentation: no machine has it
    listener = Listener("127.0.0.2")
    host, port = listener.address.split(":")
    assert host == "127.0.0.2"
    with pytest.raises(TransferError, match=r"no peer at 127\.0\.0\.1"):
        connect(f"127.0.0.1:{port}", "key", {"name": "x"})
    listener.close()
