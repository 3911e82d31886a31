"""Scenarios of running servers: a function and a row for each.

Invariants:
- A name means the same situation here and in core/stress/scenarios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.base.registry import Registry

if TYPE_CHECKING:
    from kvcheck.core.live.scenarios.scenario import ServerScenario

LIVE_SCENARIOS: Registry[ServerScenario] = Registry(
    "scenario of a running server",
    {
        "prefix-cache": (
            "kvcheck.core.live.scenarios.prefixes:PREFIX_CACHE",
            "Requests share prefixes that end inside pages, continue conversations, and come back after others.",
        ),
        "retract-resume": (
            "kvcheck.core.live.scenarios.pressure:RETRACT_RESUME",
            "More long answers at a time than the pool holds, so that requests are retracted and resumed.",
        ),
        "hicache": (
            "kvcheck.core.live.scenarios.prefixes:HICACHE",
            "Prefixes are evicted from the device by others and asked for again, from the host or storage tier.",
        ),
        "pd-transfer": (
            "kvcheck.core.live.scenarios.prefixes:PD_TRANSFER",
            "A prefill server computes prompts of many lengths, and a decode server answers from the moved cache.",
        ),
        "aborts": (
            "kvcheck.core.live.scenarios.pressure:ABORTS",
            "Requests are aborted at drawn moments, by call and by closed connections, and sent again, beside others.",
        ),
        "priority": (
            "kvcheck.core.live.scenarios.pressure:PRIORITY",
            "Requests of high priority arrive while many of low priority run, in less memory than all need.",
        ),
    },
)
