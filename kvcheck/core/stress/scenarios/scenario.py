"""Scenario: a workload, its driver, and the evidence without which a run is UNKNOWN. It judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.variants import Settings, Variant
from kvcheck.core.stress.targets.target import Target
from kvcheck.core.stress.workload.jobs import Job

ACTS, ABORTS, TRANSFERS, STORE = "acts", "aborts", "transfers", "store"
FAULTS: Final = (ACTS, ABORTS, TRANSFERS, STORE)
"""Kinds of faults: disturbances, aborts by a scenario's rule, broken writes and messages of a transfer, and damaged
stored objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """capacity_tokens: the pool is sized for these. max_running: requests that decode together. chunk_tokens: prefill
    tokens of a round and request. note: how a trace was scaled. rivals: the last of the jobs, which a disturber may
    hold back. decoder: row of DECODERS. faults: the kinds of faults that happen."""

    jobs: tuple[Job, ...]
    capacity_tokens: int
    max_running: int
    chunk_tokens: int
    note: str
    from_trace: bool = False
    decoder: str = "words"
    rivals: tuple[Rival, ...] = ()
    faults: frozenset[str] = frozenset(FAULTS)


class Scenario(Protocol):
    name: str
    needs: frozenset[str]
    families: frozenset[str]
    """Pool families that the scenario makes sense for."""

    @property
    def table(self) -> Settings: ...

    def lanes(self, variant: Variant, shape: ModelShape) -> tuple[str, ...]:
        """Rows of LANE_GROUPS used by such a schedule."""

    def load(
        self,
        shape: ModelShape,
        *,
        seed: int,
        requests: int | None,
        trace: str | None,
        variant: int,
        is_short: bool = False,
    ) -> Load:
        """Return the workload; equal arguments give equal jobs. is_short: its requests will be cut to few pages."""

    def run(
        self,
        target: Target,
        shape: ModelShape,
        load: Load,
        *,
        backend: Backend,
        emit: Emit,
        variant: int,
    ) -> int:
        """Drive the target to the end; return device evictions. variant: its number picks the settings."""

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Return the missing evidence, or None if it is enough."""
