"""Scenario: a workload, its driver, and the evidence without which a run is UNKNOWN. It judges nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.variants import Settings, Variant
from kvcheck.core.stress.targets.target import Target
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.synthetic import trace_rows
from kvcheck.core.stress.workload.traces import scale_trace

ACTS, ABORTS, TRANSFERS, STORE = "acts", "aborts", "transfers", "store"
FAULTS: Final = (ACTS, ABORTS, TRANSFERS, STORE)
"""Kinds of faults: disturbances, aborts by a scenario's rule, broken writes and messages of a transfer, and damaged
stored objects."""


CHUNKS: dict[str, Callable[[int], int]] = {
    "2 pages": lambda page: 2 * page,
    "1.5 pages": lambda page: page + max(1, page // 2),
    "1 page and a token": lambda page: page + 1,
    "half a page": lambda page: max(1, page // 2),
}
"""Prefill tokens of a round and request, from the tokens of a page. All but the first end chunks inside of pages."""
TRACE_CHUNK = "2 pages"
TRACE_PAGES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """chunk_tokens: prefill tokens of a round and request. note: how a trace was scaled. rivals: the last of the jobs,
    which a disturber may hold back. decoder: row of DECODERS."""

    jobs: tuple[Job, ...]
    capacity_tokens: int
    max_running: int
    chunk_tokens: int
    note: str
    from_trace: bool = False
    decoder: str = "words"
    rivals: tuple[Rival, ...] = ()
    faults: frozenset[str] = frozenset(FAULTS)


class Scenario(ABC):
    name: str
    needs: frozenset[str]
    families: frozenset[str]
    trace_running = 8
    """Requests of a trace that decode together."""

    @property
    @abstractmethod
    def table(self) -> Settings: ...

    @abstractmethod
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
        if trace is not None:
            return trace_load(shape, trace, seed=seed, requests=requests, max_running=self.trace_running)
        row = self.table.variant(variant)
        return self.drawn(shape, row, seed=seed, requests=requests, is_short=is_short)

    @abstractmethod
    def drawn(self, shape: ModelShape, row: Variant, *, seed: int, requests: int | None, is_short: bool) -> Load:
        """A workload without a trace, with the settings of a row."""

    @abstractmethod
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

    @abstractmethod
    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Return the missing evidence, or None if it is enough."""


def trace_load(shape: ModelShape, trace: str, *, seed: int, requests: int | None, max_running: int) -> Load:
    capacity = max(TRACE_PAGES * shape.page_size, 512)
    rows = trace_rows(trace, requests)
    workload = scale_trace(rows, capacity, seed=seed, mean_output=28 if shape.page_size >= 64 else None)
    return Load(
        jobs=workload.jobs,
        capacity_tokens=capacity,
        max_running=max_running,
        chunk_tokens=CHUNKS[TRACE_CHUNK](shape.page_size),
        note=workload.note,
        from_trace=True,
    )
