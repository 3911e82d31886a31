"""Oracles: each judges one contract over a history."""

from __future__ import annotations

from collections.abc import Callable

from kvcheck.core.base.registry import Registry
from kvcheck.core.stress.oracles.oracle import Oracle

ORACLES: Registry[Callable[[], Oracle]] = Registry(
    "oracle",
    {
        "content": "kvcheck.core.stress.oracles.content:ContentOracle",
        "aliasing": "kvcheck.core.stress.oracles.aliasing:AliasingOracle",
        "ordering": "kvcheck.core.stress.oracles.ordering:OrderingOracle",
        "lifetime": "kvcheck.core.stress.oracles.lifetime:LifetimeOracle",
        "residency": "kvcheck.core.stress.oracles.residency:ResidencyOracle",
        "contract": "kvcheck.core.stress.oracles.contract:ContractOracle",
        "accounting": "kvcheck.core.stress.oracles.accounting:AccountingOracle",
        "protocol": "kvcheck.core.stress.oracles.protocol:ProtocolOracle",
        "output": "kvcheck.core.stress.oracles.output:OutputOracle",
        "liveness": "kvcheck.core.stress.oracles.liveness:LivenessOracle",
    },
)
