"""retract-resume: a pool too small for its requests, so that running ones are retracted, offloaded and resumed.

Invariants:
- Pages of a retracted request are given to others before it is resumed, or the run does not count.
- The reference run has room for everything: no retraction, no prefix tree, no reuse of pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcheck.core.backend.backend import Backend
from kvcheck.core.backend.eager import EagerBackend
from kvcheck.core.errors import Hang, InternalError
from kvcheck.core.paging import pages_for
from kvcheck.core.pools import POOLS
from kvcheck.core.pools.pool import KVPool, PoolSizes
from kvcheck.core.pools.shape import ModelShape
from kvcheck.core.record import Evidence
from kvcheck.core.scheduler.request import Generation, SchedulerConfig
from kvcheck.core.stress.history import Closed, Counted, Finished, History, Resumed, Retracted, Returned
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.target import Engine, Setup, Target
from kvcheck.core.transfer.metadata import MetadataField
from kvcheck.core.workload.decoder import ContentDecoder, prompt_tokens
from kvcheck.core.workload.jobs import Job
from kvcheck.core.workload.synthetic import synthetic_jobs, trace_file
from kvcheck.core.workload.traces import read_trace, scale_trace

SYNTHETIC_PAGES = 8
TRACE_PAGES = 24
MAX_RUNNING = 8
TRACE_RUNNING = 16
REFERENCE_RUNNING = 48
HURRY = 8
"""Jobs arrive this much faster than their workload says, so that requests queue and the pool stays full."""
IDLE_ROUNDS = 2000
"""Rounds in which no request finishes before a run counts as hung."""


class RetractResume:
    """Decode under memory pressure: retract by policy, offload to the host, let others reuse the pages, resume."""

    name = "retract-resume"
    needs = frozenset({"retract-resume", "metadata"})

    def load(self, shape: ModelShape, *, seed: int, requests: int | None, trace: str | None) -> Load:
        """Synthetic jobs, or a trace scaled to the pool."""
        if trace is None:
            capacity = SYNTHETIC_PAGES * shape.page_size
            jobs = synthetic_jobs(
                shape.page_size, capacity, requests=requests or 20, seed=seed, chunk_tokens=_chunk_tokens(shape)
            )
            return Load(
                jobs=jobs, capacity_tokens=capacity, max_running=MAX_RUNNING, note=f"{len(jobs)} synthetic requests"
            )
        capacity = max(TRACE_PAGES * shape.page_size, 512)
        rows = read_trace(trace_file(trace), requests)
        workload = scale_trace(rows, capacity, seed=seed, mean_output=28 if shape.page_size >= 64 else None)
        return Load(jobs=workload.jobs, capacity_tokens=capacity, max_running=TRACE_RUNNING, note=workload.note)

    def reference(self, shape: ModelShape, load: Load, transport: str) -> Mapping[int, tuple[int, ...]]:
        """Run the jobs eagerly, with pages for all that run together and no prefix shared."""
        outputs: dict[int, tuple[int, ...]] = {}
        history = History()
        history.listen(((Finished, lambda event: outputs.update({event.request: event.tokens})),))
        longest = max(job.total_tokens for job in load.jobs)
        room = Load(
            jobs=load.jobs,
            capacity_tokens=REFERENCE_RUNNING * (longest + 2 * shape.page_size),
            max_running=REFERENCE_RUNNING,
            note="",
        )
        setup = _setup(shape, room, EagerBackend(), history, transport, share_prefixes=False)
        retracted = _drive(BuiltinTarget().build(setup), load.jobs, history, hurry=len(load.jobs) * 1000)
        if retracted:
            raise InternalError(f"the reference run retracted {retracted} requests; it must have room for all")
        return outputs

    def run(
        self, target: Target, shape: ModelShape, load: Load, *, backend: Backend, history: History, transport: str
    ) -> int:
        """Feed jobs by their arrival rounds until all have finished, then close."""
        engine = target.build(_setup(shape, load, backend, history, transport))
        _drive(engine, load.jobs, history, hurry=HURRY)
        for count in engine.counts():
            history.append(Counted(count.space, count.free, count.cached, count.total))
        engine.close()
        for count in engine.counts():
            history.append(Returned(count.space, count.free, count.total))
        history.append(Closed(tuple(sorted(backend.allocated().items()))))
        return engine.evictions()

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Retractions, foreign reuse, and words of every buffer."""
        if not evidence.retractions or not evidence.resumes:
            return f"{evidence.retractions or 0} retractions and {evidence.resumes or 0} resumes; use more requests"
        if not evidence.foreign_reuses:
            return "no request was resumed into pages that another had used; use more requests"
        buffers = {buffer.name for spec in POOLS.load(shape.family)(shape) for buffer in spec.buffers} | {"metadata"}
        unread = sorted(name for name in buffers if not evidence.words_verified.get(name))
        return f"no word of {', '.join(unread)} was verified" if unread else None


def _drive(engine: Engine, jobs: tuple[Job, ...], history: History, *, hurry: int) -> int:
    """Feed the jobs, `hurry` times as fast as they arrive; step until idle; returns how many retractions there were."""
    sent = round_number = idle = retracted = 0
    while sent < len(jobs) or not engine.is_idle:
        if engine.is_idle and sent < len(jobs):
            round_number = max(round_number, jobs[sent].arrival // hurry)
        while sent < len(jobs) and jobs[sent].arrival // hurry <= round_number:
            job = jobs[sent]
            engine.submit(Generation(job.request, prompt_tokens(job), job.output_tokens))
            sent += 1
        report = engine.step()
        round_number += 1
        retracted += len(report.retracted)
        for request in report.retracted:
            history.append(Retracted(request))
        for request in report.resumed:
            history.append(Resumed(request))
        for request, tokens in report.finished:
            history.append(Finished(request, tokens))
        idle = 0 if report.finished or report.admitted else idle + 1
        if idle > IDLE_ROUNDS:
            raise Hang(f"no request was admitted or finished in {IDLE_ROUNDS} rounds")
    return retracted


def _setup(
    shape: ModelShape, load: Load, backend: Backend, history: History, transport: str, *, share_prefixes: bool = True
) -> Setup:
    longest = max(job.total_tokens for job in load.jobs)

    def decoder(pool: KVPool, fields: tuple[MetadataField, ...]) -> ContentDecoder:
        return ContentDecoder(pool, backend, load.jobs, history, fields)

    return Setup(
        shape=shape,
        sizes=_sizes(shape, load.capacity_tokens, requests=load.max_running + 6, longest=longest),
        config=SchedulerConfig(
            max_running=load.max_running,
            max_prefilling=max(4, load.max_running // 2),
            chunk_tokens=_chunk_tokens(shape),
            resume_delay=12,
            retract_steps=max(shape.page_size, 64),
        ),
        metadata_slots=max(3, load.max_running // 4),
        share_prefixes=share_prefixes,
        transport=transport,
        backend=backend,
        sink=history,
        decoder=decoder,
    )


def _sizes(shape: ModelShape, capacity_tokens: int, *, requests: int, longest: int) -> PoolSizes:
    pages = pages_for(capacity_tokens, shape.page_size)
    window = pages_for(shape.window + _chunk_tokens(shape), shape.page_size) + 2
    return PoolSizes(
        pages=pages,
        requests=requests,
        max_tokens=longest + shape.page_size,
        window_pages=min(pages, requests * window) if shape.window_layers else 0,
    )


def _chunk_tokens(shape: ModelShape) -> int:
    return 2 * shape.page_size
