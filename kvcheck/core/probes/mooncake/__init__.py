"""Mooncake's transfer engine as a target: the places of its names, and the probes that compare statuses with bytes.

The package needs no tensor library: the environment has only the library.
"""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.tables import EngineSpec, ProbeRow
from kvcheck.core.probes.mooncake.names import NAMES

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
