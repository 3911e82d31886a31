"""Oracles: each one judges one contract over a history."""

from __future__ import annotations

from collections.abc import Callable

from kvcheck.core.base.registry import Registry
from kvcheck.core.stress.oracles.oracle import Oracle

ORACLES: Registry[Callable[[], Oracle]] = Registry(
    "oracle",
    {
        "content": (
            "kvcheck.core.stress.oracles.content:ContentOracle",
            "Every word that a request reads was written for it, for that position and in that buffer.",
        ),
        "aliasing": (
            "kvcheck.core.stress.oracles.aliasing:AliasingOracle",
            "Offloaded values and metadata rows own their memory, and index values stay as they were handed over.",
        ),
        "ordering": (
            "kvcheck.core.stress.oracles.ordering:OrderingOracle",
            "Every read waits for the writes it needs, and no write overtakes an operation that may use the rows.",
        ),
        "lifetime": (
            "kvcheck.core.stress.oracles.lifetime:LifetimeOracle",
            "No page or slot is freed while in use, used while free, or written for a request that does not own it.",
        ),
        "residency": (
            "kvcheck.core.stress.oracles.residency:ResidencyOracle",
            "Index values of cached pages keep their numbers and stay on the tier they were made for.",
        ),
        "caching": (
            "kvcheck.core.stress.oracles.caching:CachingOracle",
            "Evictions keep to the declared order, copies are left out only for want of room, and hits are served.",
        ),
        "contract": (
            "kvcheck.core.stress.oracles.contract:ContractOracle",
            "Committed lengths survive retract and resume, every buffer is moved, and padding rows are never used.",
        ),
        "accounting": (
            "kvcheck.core.stress.oracles.accounting:AccountingOracle",
            "Nothing is lost: free and cached units add up to the total when idle, and none is allocated after close.",
        ),
        "protocol": (
            "kvcheck.core.stress.oracles.protocol:ProtocolOracle",
            "Success follows the bytes, a terminal state is final, and ranks agree.",
        ),
        "transfers": (
            "kvcheck.core.stress.oracles.transfers:TransfersOracle",
            "Each end sends what it owes the other in the round in which it is due, and seals are cleared in time.",
        ),
        "reports": (
            "kvcheck.core.stress.oracles.reports:ReportsOracle",
            "Each attempt is admitted, joins and ends once, and what is reported is what was done.",
        ),
        "progress": (
            "kvcheck.core.stress.oracles.progress:ProgressOracle",
            "A request does not wait beside the room for it, and a batch that has room is computed in every round.",
        ),
        "output": (
            "kvcheck.core.stress.oracles.output:OutputOracle",
            "Every request's tokens are those of a run in which nothing was retracted or shared.",
        ),
        "liveness": (
            "kvcheck.core.stress.oracles.liveness:LivenessOracle",
            "Every request finishes within the step budget, and the code under test raises nothing.",
        ),
    },
)
