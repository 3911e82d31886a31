"""Scenarios: what is done to a target, and what must have happened for a pass to count."""

from __future__ import annotations

from kvcheck.core.base.registry import Registry
from kvcheck.core.stress.scenarios.scenario import Scenario

SCENARIOS: Registry[type[Scenario]] = Registry(
    "scenario",
    {
        "retract-resume": "kvcheck.core.stress.scenarios.retract_resume:RetractResume",
        "hicache": "kvcheck.core.stress.scenarios.hicache:HiCacheScenario",
        "hicache-hybrid": "kvcheck.core.stress.scenarios.hicache:HybridScenario",
        "pd-transfer": "kvcheck.core.stress.scenarios.pd_transfer:PDTransfer",
        "nvlink-aux": "kvcheck.core.stress.scenarios.pd_transfer:NVLinkAux",
    },
)
