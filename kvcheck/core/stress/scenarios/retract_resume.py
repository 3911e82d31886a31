"""retract-resume: a decode pool too small for its requests: running ones are retracted, offloaded and resumed."""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools import FAMILIES
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.disturber import disturber
from kvcheck.core.stress.scenarios.pd_transfer import prefill_sizes, room_of
from kvcheck.core.stress.scenarios.scenario import CHUNKS, Load, Scenario
from kvcheck.core.stress.scenarios.serving import (
    buffer_names,
    make_setup,
    serve,
    synthetic_load,
    unread,
)
from kvcheck.core.stress.scenarios.variants import Settings, Variant, settings_of
from kvcheck.core.stress.targets.target import PairSetup, Target
from kvcheck.core.stress.workload.events import HandoversKnown
from kvcheck.core.stress.workload.handover import bytes_for

SYNTHETIC_PAGES = 9
REQUESTS = 8
LONGER_PAGES = 1
"""Outputs are longer by this, so that requests run out of pages while they decode."""
MAX_RUNNING = 8
FOCUS = ("request/restoring/abort", "request/retracted/abort", "request/restoring/preempt")
RESTS = {"12 rounds": 12, "2 rounds": 2}
"""Rounds that a retracted request rests before others wait for it."""
HEADROOMS = {"many steps": None, "1 step": 1}
"""Steps for which a retraction makes room: most requests are retracted at once, or one after another is."""


class RetractResume(Scenario):
    name = "retract-resume"
    needs = frozenset({"retract-resume", "metadata"})
    families = FAMILIES
    trace_running = 16

    @property
    def table(self) -> Settings:
        return settings_of({"prefill chunk": CHUNKS, "rest": RESTS, "headroom": HEADROOMS})

    def lanes(self, variant: Variant, shape: ModelShape) -> tuple[str, ...]:
        return ("compute", "d2h", "h2d", "wire", "message")

    def drawn(self, shape: ModelShape, row: Variant, *, seed: int, requests: int | None, is_short: bool) -> Load:
        """With window layers, outputs are one window longer, and the pool two, so that windows move by all their pages
        before a retraction and after the resume."""
        window = pages_for(shape.window, shape.page_size) if shape.window_layers else 0
        return synthetic_load(
            shape,
            pages=SYNTHETIC_PAGES + 2 * window,
            requests=requests or REQUESTS,
            max_running=MAX_RUNNING,
            seed=seed,
            chunk=row["prefill chunk"],
            longer_pages=LONGER_PAGES + window,
        )

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
        row = self.table.variant(variant)
        setup = make_setup(shape, load, backend, emit, share_prefixes=False)
        emit(HandoversKnown({job.request: bytes_for(shape, job.prompt_tokens, 1) for job in load.jobs}))
        steps = HEADROOMS[row["headroom"]] or setup.config.retract_steps
        config = replace(setup.config, resume_delay=RESTS[row["rest"]], retract_steps=steps)
        pair = PairSetup(
            prefill_ranks=1,
            decode_ranks=1,
            prefill_sizes=prefill_sizes(setup.sizes, load.jobs, shape),
            paths={},
            room_of=room_of,
        )
        return serve(
            target.build(replace(setup, pair=pair, config=config)),
            load,
            emit,
            backend,
            disturber=disturber(self.name, load, emit, variant, shape=shape.name, focus=FOCUS),
        )

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        if not evidence.retractions or not evidence.resumes:
            return f"{evidence.retractions or 0} retractions and {evidence.resumes or 0} resumes; use more requests"
        if not evidence.foreign_reuses:
            return "no request was resumed into pages that another had used; use more requests"
        return unread(evidence, buffer_names(shape) | {"metadata"})
