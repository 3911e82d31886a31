"""Ranks on several machines: the place of this process, from the variables that torchrun sets.

Invariants:
- If a variable is missing, or the run is in one process, this process is alone.
- Rank 0 judges and writes the record; all others start ranks for it, print nothing, and exit 0 unless they fail.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING

from kvcheck.commands.terminal import warn
from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.transfer import PROCESS_TRANSPORTS
from kvcheck.core.stress.schedule import Kind, Plan, parse_ranks

if TYPE_CHECKING:
    from kvcheck.core.stress.ranks.agent_launcher import Address
    from kvcheck.core.stress.ranks.runner import RankRunner

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AUTO = "auto"
LOOPBACK = "127.0.0.1"
MOST_PORT = (1 << 16) - 1


def find_place(plan: Plan, bind: str) -> Address | None:
    """The place of this process; None if it is alone. Raises UsageError if the number of processes does not fit the
    plan."""
    found = {name: os.environ.get(name, "") for name in VARIABLES}
    if plan.kind is not Kind.RANKS or not all(found.values()):
        if bind != LOOPBACK:
            able = " or ".join(PROCESS_TRANSPORTS)
            raise UsageError(f"--bind {bind}: expected a run under torchrun with --transport {able}")
        return None
    from kvcheck.core.stress.ranks.agent_launcher import Address

    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not found[name].isascii() or not found[name].isdigit():
            raise UsageError(f"{name}: expected a number, got {found[name][:40]!r}")
    rank, world, port = (int(found[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 1 <= port <= MOST_PORT:
        raise UsageError(f"MASTER_PORT: expected a port from 1 to {MOST_PORT}, got {found['MASTER_PORT'][:40]}")
    prefill, decode = parse_ranks(plan.ranks or "1x1")
    if world != prefill + decode or rank >= world:
        raise UsageError(
            f"--ranks {prefill}x{decode} needs {prefill + decode} processes, and this is number {rank} of {world}; "
            f"next: torchrun --nproc-per-node {prefill + decode}, or as many on several machines together"
        )
    host = found["MASTER_ADDR"]
    return Address(
        rank=rank,
        world=world,
        store_host=host,
        store_port=port,
        is_host=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        bind=_own_address(host, port) if bind == AUTO else bind,
    )


def serve_place(place: Address) -> int:
    """Start ranks for rank 0 until it has no more of them."""
    from kvcheck.core.stress.ranks import worker
    from kvcheck.core.stress.ranks.agent_launcher import run_agent

    run_agent(place, worker.__name__)
    return 0


def exposure(plan: Plan, place: Address | None) -> list[str]:
    """Warn, also in the record, if Mooncake's engine can be reached from outside."""
    if plan.transport != "mooncake":
        return []
    why = "ranks of several machines have to reach each other"
    if place is None:
        from kvcheck.core.base.private_network import PrivateNetwork

        with PrivateNetwork() as network:
            if network.path is not None:
                return []
            why = network.why
    text = (
        f"Mooncake's engine listens on all interfaces of this machine and asks nobody who he is: {why}; "
        "expected a network where everybody is trusted"
    )
    warn(text)
    return [text]


@contextmanager
def ranks_of(place: Address | None) -> Iterator[RankRunner | None]:
    """The runner of rank 0, whose own rank has an agent too; None without torchrun."""
    if place is None:
        yield None
        return
    from kvcheck.core.stress.ranks.agent_launcher import ANSWER_S, AgentLauncher
    from kvcheck.core.stress.ranks.runner import RankRunner

    launcher = AgentLauncher(place)
    agent = Thread(target=serve_place, args=(replace(place, is_host=False),), name="agent", daemon=True)
    agent.start()
    try:
        yield RankRunner(launcher)
    finally:
        launcher.dismiss()
        agent.join(ANSWER_S)


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which MASTER_ADDR is reached."""
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((host, port))  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"--bind auto: no way to {host}: {error}; name an address of this machine") from error
