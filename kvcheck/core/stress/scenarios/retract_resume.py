"""retract-resume: a pool too small for its requests, so that running ones are retracted, offloaded and resumed.

Invariants:
- A run counts only if other requests got pages of a retracted one before it was resumed.
- The reference run has room for everything: no retraction, no prefix tree, no reuse of pages.
"""

from __future__ import annotations

from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.pools import FAMILIES
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.serving import (
    buffer_names,
    make_setup,
    serve,
    synthetic_load,
    trace_load,
    unread,
)
from kvcheck.core.targets.target import Target
from kvcheck.core.workload.events import Emit

SYNTHETIC_PAGES = 8
MAX_RUNNING = 8
TRACE_RUNNING = 16


class RetractResume:
    """Decode under memory pressure: retract by policy, offload to the host, let others reuse the pages, resume."""

    name = "retract-resume"
    needs = frozenset({"retract-resume", "metadata"})
    families = FAMILIES

    def load(self, shape: ModelShape, *, seed: int, requests: int | None, trace: str | None) -> Load:
        """Synthetic jobs, or a trace scaled to the pool."""
        if trace is None:
            return synthetic_load(
                shape, pages=SYNTHETIC_PAGES, requests=requests or 20, max_running=MAX_RUNNING, seed=seed
            )
        return trace_load(shape, trace, seed=seed, requests=requests, max_running=TRACE_RUNNING)

    def run(
        self,
        target: Target,
        shape: ModelShape,
        load: Load,
        *,
        backend: Backend,
        emit: Emit,
        transport: str,
        variant: int,
    ) -> int:
        """Feed jobs by their arrival rounds until all have finished, then close."""
        engine = target.build(make_setup(shape, load, backend, emit, transport))
        return serve(engine, load, emit, backend)

    def settings(self, variant: int) -> tuple[str, ...]:
        """None: the number of the schedule picks the order alone."""
        return ()

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Retractions, foreign reuse, and words of every buffer."""
        if not evidence.retractions or not evidence.resumes:
            return f"{evidence.retractions or 0} retractions and {evidence.resumes or 0} resumes; use more requests"
        if not evidence.foreign_reuses:
            return "no request was resumed into pages that another had used; use more requests"
        return unread(evidence, buffer_names(shape) | {"metadata"})
