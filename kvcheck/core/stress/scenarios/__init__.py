"""Scenarios: workloads for a target, with the evidence that a pass requires."""

from __future__ import annotations

from kvcheck.core.base.registry import Registry
from kvcheck.core.stress.scenarios.scenario import Scenario

SCENARIOS: Registry[type[Scenario]] = Registry(
    "scenario",
    {
        "retract-resume": (
            "kvcheck.core.stress.scenarios.retract_resume:RetractResume",
            "Decode runs out of memory: requests are retracted, offloaded to the host and resumed on other pages.",
        ),
        "hicache": (
            "kvcheck.core.stress.scenarios.hicache:HiCacheScenario",
            "Requests come back to prefixes that were evicted from the device, or from the host as well.",
        ),
        "hicache-hybrid": (
            "kvcheck.core.stress.scenarios.hicache:HybridScenario",
            "The same as hicache, for pools whose prefixes also hold window pages or recurrent states.",
        ),
        "pd-transfer": (
            "kvcheck.core.stress.scenarios.pd_transfer:PDTransfer",
            "A prefill end sends KV, state and metadata to a decode end; completion means that the bytes have landed.",
        ),
        "nvlink-aux": (
            "kvcheck.core.stress.scenarios.pd_transfer:NVLinkAux",
            "The same as pd-transfer, but completion means only that a copy is queued; metadata goes three ways.",
        ),
    },
)
