"""Serving: feeds jobs to an engine by their arrival rounds; with the setup and the reference run of all scenarios."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from kvcheck.core.base.deadline import progress_watch
from kvcheck.core.base.errors import Hang, TargetError
from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.pool import KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.scheduler.decoder import Decoder
from kvcheck.core.cache.scheduler.request import Request, SchedulerConfig, StepReport
from kvcheck.core.cache.transfer.metadata import MetadataField
from kvcheck.core.stress.history import History
from kvcheck.core.stress.scenarios.disturber import Disturber
from kvcheck.core.stress.scenarios.scenario import CHUNKS, Load
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import Engine, FirstWords, HostTier, Setup, TierInspector
from kvcheck.core.stress.workload import KNOWN_ANSWER
from kvcheck.core.stress.workload.decoder import ContentDecoder, prompt_tokens
from kvcheck.core.stress.workload.events import (
    Aborted,
    Closed,
    Counted,
    Failed,
    Finished,
    Resumed,
    Retracted,
    Retried,
    Returned,
    Sent,
    SitesKnown,
)
from kvcheck.core.stress.workload.footprints import row_sites
from kvcheck.core.stress.workload.host_inspector import HostHits, HostInspector
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.known_answers import KnownAnswerDecoder
from kvcheck.core.stress.workload.known_model import known_model
from kvcheck.core.stress.workload.observation import Readers
from kvcheck.core.stress.workload.room_inspector import WordInspector
from kvcheck.core.stress.workload.synthetic import synthetic_jobs

LEAST_GRAIN = 4
"""Lengths are drawn as for pages of so many tokens at the least, and pools have room for those."""
REFERENCE_RUNNING = 48
HURRY = 8
"""Jobs arrive this much faster than in their workload, so that requests queue and the pool stays full."""
IDLE_ROUNDS = 2000
"""Rounds in which no request finishes before a run counts as hung."""
ROUNDS_A_TOKEN = 16
"""A request takes a round for each token, and more if it is retracted. Rounds for so many times the tokens of the
longest one, in which no request ends, count as hung too: requests are then admitted and retracted for ever."""
STUCK_CPU_S = 60.0
"""CPU seconds without a computed position or a read word after which a schedule counts as an endless loop. The longest
schedules of full shapes do both many times a second."""
CACHED_STATES = 3
"""State slots beyond those of requests, for cached prefixes on the device."""
ABORT_EVERY = 4
PRIORITIES = 3
"""Requests have priorities 0 .. 2, by their number."""


Aborts = Callable[[StepReport], list[int]]


class Retries(Protocol):
    """Chooses failed requests to send again after a round, each once."""

    @property
    def is_open(self) -> bool: ...

    def __call__(self, report: StepReport) -> list[int]: ...


class LoadingAborts:
    def __init__(self) -> None:
        self._loading = 0

    def __call__(self, report: StepReport) -> list[int]:
        chosen = []
        for request_id in report.loading:
            self._loading += 1
            if request_id % PRIORITIES == 0 or self._loading % ABORT_EVERY == 0:
                chosen.append(request_id)
        return chosen


class Feed:
    """Hands jobs out round by round, `hurry` times as fast as they arrive, and at once to an idle engine. held:
    requests for `release`, or for after all others."""

    def __init__(self, jobs: tuple[Job, ...], *, hurry: int, held: Collection[int] = ()) -> None:
        self._jobs = tuple(job for job in jobs if job.request not in held)
        self._held = {job.request: job for job in jobs if job.request in held}
        self._hurry = hurry
        self._sent = 0
        self._round = 0

    @property
    def is_open(self) -> bool:
        return self._sent < len(self._jobs) or bool(self._held)

    def due(self, *, is_idle: bool) -> list[Request]:
        if self._sent == len(self._jobs):
            rest = tuple(self._held.values()) if is_idle else ()
            self._held = {} if is_idle else self._held
            return [request_of(job) for job in rest]
        if is_idle:
            self._round = max(self._round, self._jobs[self._sent].arrival // self._hurry)
        start = self._sent
        while self._sent < len(self._jobs) and self._jobs[self._sent].arrival // self._hurry <= self._round:
            self._sent += 1
        self._round += 1
        return [request_of(job) for job in self._jobs[start : self._sent]]

    def holds(self, request_id: int) -> bool:
        return request_id in self._held

    def release(self, request_id: int) -> Request:
        return replace(request_of(self._held.pop(request_id)), is_urgent=True)

    def again(self, request_id: int) -> Request:
        job = next(job for job in self._jobs[: self._sent] if job.request == request_id)
        return replace(request_of(job), attempt=1)


def request_of(job: Job) -> Request:
    return Request(job.request, prompt_tokens(job), job.output_tokens, job.request % PRIORITIES)


def synthetic_load(
    shape: ModelShape, *, pages: int, requests: int, max_running: int, seed: int, chunk: str, longer_pages: int = 0
) -> Load:
    capacity = pages * grain_of(shape)
    chunk_tokens = CHUNKS[chunk](shape.page_size)
    jobs = synthetic_jobs(
        grain_of(shape),
        capacity,
        requests=requests,
        seed=seed,
        chunk_tokens=chunk_tokens,
        longer_pages=longer_pages,
    )
    note = f"{len(jobs)} synthetic requests"
    return Load(jobs=jobs, capacity_tokens=capacity, max_running=max_running, chunk_tokens=chunk_tokens, note=note)


def grain_of(shape: ModelShape) -> int:
    return max(shape.page_size, LEAST_GRAIN)


def buffer_names(shape: ModelShape) -> set[str]:
    return {buffer.name for spec in POOLS.load(shape.family)(shape) for buffer in spec.buffers}


def unread(evidence: Evidence, wanted: set[str]) -> str | None:
    missing = sorted(name for name in wanted if not evidence.words_verified.get(name))
    return f"no word of {', '.join(missing)} was verified" if missing else None


def serve(
    engine: Engine,
    load: Load,
    emit: Emit,
    backend: Backend,
    *,
    aborts: Aborts | None = None,
    retries: Retries | None = None,
    disturber: Disturber | None = None,
) -> int:
    """Drive an engine to the end, emit its counts and close it. Return its device evictions."""
    drive(engine, load.jobs, emit, hurry=HURRY, aborts=aborts, retries=retries, disturber=disturber)
    for count in engine.counts():
        emit(Counted(count.space, count.free, count.cached, count.total))
    engine.close()
    for count in engine.counts():
        emit(Returned(count.space, count.free, count.total))
    emit(Closed(tuple(sorted(backend.allocated().items()))))
    return engine.evictions()


def reference_outputs(shape: ModelShape, load: Load) -> Mapping[int, tuple[int, ...]]:
    """The expected outputs. Decoder words: of an eager run with pages for all requests, without retraction or prefix
    tree; known-answer: computed from the prompts. Raises Stuck for an endless loop."""
    if load.decoder == KNOWN_ANSWER:
        return {job.request: known_model(shape).answers(job) for job in load.jobs}
    outputs: dict[int, tuple[int, ...]] = {}
    history = History()
    history.listen(((Finished, lambda event: outputs.update({event.request: event.tokens})),))
    longest = max(job.total_tokens for job in load.jobs)
    room = Load(
        jobs=load.jobs,
        capacity_tokens=REFERENCE_RUNNING * (longest + 2 * shape.page_size),
        max_running=REFERENCE_RUNNING,
        chunk_tokens=2 * shape.page_size,
        note="",
    )
    setup = make_setup(shape, room, EagerBackend(), history.emit, share_prefixes=False, readers=Readers(one_layer=True))
    with progress_watch(STUCK_CPU_S, lambda: history.count):
        retracted = drive(BuiltinTarget().build(setup), load.jobs, history.emit, hurry=len(load.jobs) * 1000)
    if retracted:
        raise TargetError(f"{retracted} requests were retracted, where there is room for all")
    return outputs


def drive(
    engine: Engine,
    jobs: tuple[Job, ...],
    emit: Emit,
    *,
    hurry: int,
    aborts: Aborts | None = None,
    retries: Retries | None = None,
    disturber: Disturber | None = None,
) -> int:
    """Feed the jobs, `hurry` times as fast as they arrive; step until idle; return the number of retractions."""
    feed = Feed(jobs, hurry=hurry, held=disturber.held if disturber is not None else ())
    most_rounds = IDLE_ROUNDS + ROUNDS_A_TOKEN * max((job.total_tokens for job in jobs), default=0)
    idle = endless = retracted = 0
    while feed.is_open or not engine.is_idle or (retries is not None and retries.is_open):
        for request in feed.due(is_idle=engine.is_idle):
            _send(engine, request, emit)
        if disturber is not None and (rival := disturber(engine)) is not None and feed.holds(rival):
            _send(engine, feed.release(rival), emit)
        report = engine.step()
        retracted += len(report.retracted)
        for request_id in aborts(report) if aborts is not None else ():
            if engine.abort(request_id):
                emit(Aborted(request_id))
        for request_id in report.retracted:
            emit(Retracted(request_id))
        for request_id in report.resumed:
            emit(Resumed(request_id))
        for request_id, tokens in report.finished:
            emit(Finished(request_id, tokens))
        for request_id, reason in report.failed:
            emit(Failed(request_id, reason))
        for request_id in retries(report) if retries is not None else ():
            emit(Retried(request_id))
            _send(engine, feed.again(request_id), emit)
        idle = 0 if report.finished or report.admitted or report.failed else idle + 1
        if idle > IDLE_ROUNDS:
            raise Hang(f"no request was admitted or finished in {IDLE_ROUNDS} rounds")
        endless = 0 if report.finished or report.failed else endless + 1
        if endless > most_rounds:
            raise Hang(f"no request finished or failed in {most_rounds} rounds, though some were admitted")
    return retracted


def _send(engine: Engine, request: Request, emit: Emit) -> None:
    emit(Sent(request.request_id, request.attempt, len(request.prompt)))
    engine.submit(request)


def make_setup(
    shape: ModelShape,
    load: Load,
    backend: Backend,
    emit: Emit,
    *,
    share_prefixes: bool = True,
    host: HostTier | None = None,
    readers: Readers | None = None,
    max_running: int | None = None,
) -> Setup:
    """host: with one, prefixes take state slots of their own. max_running: of a batch smaller than the pool."""
    longest = max(job.total_tokens for job in load.jobs)
    made: list[ContentDecoder] = []
    knows_answers = load.decoder == KNOWN_ANSWER
    first_tokens: dict[int, int] = {}
    hits = HostHits(emit)
    emit(SitesKnown(row_sites(shape)))

    def decoder(pool: KVPool, fields: tuple[MetadataField, ...], first_words: FirstWords) -> Decoder:
        if knows_answers:
            return KnownAnswerDecoder(
                pool, pool.backend, load.jobs, emit, fields, first_tokens, readers, host_pages=hits.pages
            )
        made.append(ContentDecoder(pool, pool.backend, load.jobs, emit, fields, readers, first_words))
        return made[-1]

    def inspector() -> TierInspector:
        return HostInspector(shape, made[-1].codes_of, emit)

    return Setup(
        shape=shape,
        sizes=_sizes(shape, load, requests=(load.max_running + 6) | 1, longest=longest, host=host),
        config=SchedulerConfig(
            max_running=max_running or load.max_running,
            max_prefilling=max(4, load.max_running // 2),
            chunk_tokens=load.chunk_tokens,
            resume_delay=12,
            retract_steps=max(shape.page_size, 64),
        ),
        metadata_slots=max(3, load.max_running // 4) | 1,
        share_prefixes=share_prefixes,
        backend=backend,
        emit=hits if knows_answers else emit,
        decoder=decoder,
        host=host,
        inspector=inspector if host is not None and not knows_answers else None,
        room_inspector=None if knows_answers else lambda: WordInspector(made[-1], emit),
    )


def _sizes(shape: ModelShape, load: Load, *, requests: int, longest: int, host: HostTier | None) -> PoolSizes:
    """Odd numbers, so that no table or buffer is a whole number of pages, chunks or ranks by chance."""
    pages = pages_for(load.capacity_tokens, shape.page_size)
    window = pages_for(shape.window + load.chunk_tokens, shape.page_size) + 2
    return PoolSizes(
        pages=pages,
        requests=requests,
        max_tokens=(longest + 1) | 1,
        window_pages=min(pages, requests * window) if shape.window_layers else 0,
        state_slots=requests + CACHED_STATES if host is not None and shape.state_layers else 0,
    )
