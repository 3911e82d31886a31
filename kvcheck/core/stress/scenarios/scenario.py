"""Scenario: a workload, how it is driven, and the evidence without which a run is UNKNOWN.

Invariants:
- A scenario drives the target through the Engine Protocol and emits events; it judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.targets.target import Target
from kvcheck.core.workload.events import Emit
from kvcheck.core.workload.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Jobs, and the tokens that the pool is sized for.

    max_running: requests that decode together. note: how a trace was scaled. from_trace: the jobs are of a trace.
    rivals: the last of the jobs, where a disturber may hold some back until what they share is in a certain state.
    """

    jobs: tuple[Job, ...]
    capacity_tokens: int
    max_running: int
    note: str
    from_trace: bool = False
    rivals: tuple[Rival, ...] = ()


class Scenario(Protocol):
    """One way to stress a target."""

    name: str
    needs: frozenset[str]
    families: frozenset[str]
    """Pool families that the scenario makes sense for."""

    def load(self, shape: ModelShape, *, seed: int, requests: int | None, trace: str | None) -> Load:
        """The workload; equal arguments give equal jobs."""

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
        """Drive the target to the end; returns device evictions. variant: number of the schedule, picks settings."""

    def settings(self, variant: int) -> tuple[str, ...]:
        """What the number of the schedule picks, each as "kind:value"; none where it picks nothing."""

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Says what was not exercised, or None if the evidence is enough."""
