"""Mooncake's transfer engine as a target: the places of its names, and the probes that compare statuses with bytes.

The package needs no tensor library: the environment has only the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow

_ENGINE = "mooncake.engine:TransferEngine"
NAMES: Final[dict[str, tuple[str, ...]]] = {
    "engine": (_ENGINE,),
    "register": (f"{_ENGINE}.register_memory",),
    "unregister": (f"{_ENGINE}.unregister_memory",),
    "sync": (f"{_ENGINE}.transfer_sync_write",),
    "batch": (f"{_ENGINE}.batch_transfer_sync_write",),
    "async": (f"{_ENGINE}.batch_transfer_async_write",),
    "async.status": (f"{_ENGINE}.get_batch_transfer_status",),
    "submit": (f"{_ENGINE}.transfer_submit_write",),
    "submit.status": (f"{_ENGINE}.transfer_check_status",),
    "notified.sync": (f"{_ENGINE}.transfer_sync",),
    "notified.batch": (f"{_ENGINE}.batch_transfer_sync",),
    "notification": ("mooncake.engine:TransferNotify",),
    "notification.list": (f"{_ENGINE}.get_notifies",),
    "opcode": ("mooncake.engine:TransferOpcode",),
}
"""One row for each capability, one place for each range of releases, tried in order."""
STATED = "MC_TRANSFER_TIMEOUT"
SOON = {STATED: "10", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_TCP_STATUS_TIMEOUT_SEC": "3"}
"""Settings of probes in which calls fail: shorter limits than the library's own, for the same outcome."""
LEAST_S = 5
"""The library replaces a shorter limit by this one."""
USUAL_S = 30
PATIENCE_S = 20.0
"""A call is late only some time after the bound that the library states: a busy machine is no finding."""


def longest_call_s(variables: Mapping[str, str]) -> float:
    stated = variables.get(STATED, "")
    return max(LEAST_S, int(stated) if stated.isdecimal() else USUAL_S) + PATIENCE_S


MOONCAKE: Final = EngineSpec(
    name="mooncake",
    package="mooncake",
    shows="An installed transfer engine of Mooncake, over TCP: whether what it reports is true.",
    stubs=(),
    table=NAMES,
    program="kvcheck.core.probes.mooncake.server:main",
    start="kvcheck.core.probes.mooncake.server:start",
    variables=("MC_",),
    untried="RDMA, NVLink, memory of a GPU, several hosts, reads, batches of more than 64 writes",
    probes=(
        ProbeRow(
            name="landing",
            scenario="transfer",
            subjects=("sync", "batch", "async", "submit", "frozen"),
            entry="kvcheck.core.probes.mooncake.landing:LandingRound",
            shows="a write that is reported done has landed whole: 4 calls in each of 5 size classes, 64 B to 8 MiB, "
            "in batches of up to 64, to up to 4 peers at once; frozen: to a peer that is stopped and goes on",
            wants=("transfers",),
            schedule_s=2.3,
        ),
        ProbeRow(
            name="failure",
            scenario="transfer",
            subjects=("refused", "frozen"),
            entry="kvcheck.core.probes.mooncake.failure:Failure",
            shows="after a failure is reported nothing of that write lands; its source and its target are used again",
            wants=("transfers", "aborts"),
            schedule_s=1.3,
        ),
        ProbeRow(
            name="registration",
            scenario="transfer",
            subjects=("sync", "batch"),
            entry="kvcheck.core.probes.mooncake.registration:Registration",
            shows="writes to memory that is not registered, wholly or in part, are refused and change nothing",
            wants=("transfers", "refusals"),
            schedule_s=0.8,
        ),
        ProbeRow(
            name="notification",
            scenario="transfer",
            subjects=("sync", "batch"),
            entry="kvcheck.core.probes.mooncake.notification:Notification",
            shows="a notification comes after the data of its write",
            wants=("transfers",),
            schedule_s=0.4,
        ),
        ProbeRow(
            name="death",
            scenario="transfer",
            subjects=("killed", "frozen", "writer-killed"),
            entry="kvcheck.core.probes.mooncake.death:Death",
            shows="a peer that is killed or frozen in the middle of a write harms nobody else, and the call to it ends",
            wants=("transfers", "aborts"),
            schedule_s=1.1,
        ),
    ),
)
