"""hicache: prefixes move to the host and come back, layer by layer, while other requests decode.

Invariants:
- Both pools are smaller than the working set, and a cell counts only if requests were retracted and resumed.
- Rivals meet prefixes in transfer between tiers. Neighbours keep pages of the same prompts in the same store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.events import Emit, Event
from kvcheck.core.cache.hicache.cache import WRITE_POLICIES
from kvcheck.core.cache.hicache.eviction import EVICTION_ORDERS
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.cache.hicache.storage import PageStore
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.disturber import disturber
from kvcheck.core.stress.scenarios.faulty_store import faulty_store
from kvcheck.core.stress.scenarios.rivals import rivals_of
from kvcheck.core.stress.scenarios.scenario import ABORTS, CHUNKS, STORE, Load, Scenario
from kvcheck.core.stress.scenarios.serving import (
    LoadingAborts,
    buffer_names,
    grain_of,
    make_setup,
    serve,
    unread,
)
from kvcheck.core.stress.scenarios.variants import Settings, Variant, settings_of
from kvcheck.core.stress.targets.target import HostTier, Target
from kvcheck.core.stress.workload.events import Damaged, Modelled, Resumed, Retracted, StoreKeeps
from kvcheck.core.stress.workload.jobs import session_jobs
from kvcheck.core.stress.workload.observation import Readers

SYNTHETIC_PAGES = 11
SYNTHETIC_REQUESTS = 36
SESSIONS = 9
"""A multiple of the priorities, so that a session keeps its own."""
MAX_RUNNING = 6
BATCHES = {"whole": MAX_RUNNING, "2": 2}
"""Requests that decode together. With a small batch, computed requests wait to decode."""
STORE_RANKS = ("0", "1")
"""The engine's rank among those that share a store."""
RIVAL_SHARE = 3
HOST_RATIOS = {"2": 2.0, "1.25": 1.25}
"""Host pages for each device page: the usual, and too few for the sessions."""
HOST_WINDOW_SHARES = {"all": 1, "a third": 3}
"""Host pages for each window page of the host: enough, and too few for the nodes, which keep only the window pages of
their ends, so that the host evicts windows while it keeps the pages."""
HOST_STATES = 7
TRACE_HOST_STATES = 128
NO_STORE = "none"
REPLAY_EVERY = 4
TRACE_HOST_RATIO = 16
"""Host pages for each device page of a trace, whose prefixes come back after hundreds of pages: the host is then far
below the trace's working set (1 page in 28 to 40 of the conversation trace), and still serves some of it."""


class HiCacheScenario(Scenario):
    name = "hicache"
    needs = frozenset({"hicache"})
    families = frozenset({"mha", "mla", "nsa"})
    focus: frozenset[str] = frozenset()

    @property
    def table(self) -> Settings:
        return settings_of(self._kinds())

    def lanes(self, variant: Variant, shape: ModelShape) -> tuple[str, ...]:
        return ("compute", "d2h", "h2d", *(("storage",) if variant["store"] != NO_STORE else ()))

    def _kinds(self) -> dict[str, Iterable[str]]:
        return {
            "host layout": HOST_LAYOUTS,
            "copy method": COPY_METHODS,
            "write policy": WRITE_POLICIES,
            "eviction order": EVICTION_ORDERS,
            "store": (NO_STORE, "memory", "files"),
            "prefill chunk": CHUNKS,
            "batch": BATCHES,
            "store rank": STORE_RANKS,
            "ack period": ("5", "3", "1", "2"),
            "ring": ("1", "2", "3"),
            "host ratio": HOST_RATIOS,
        }

    def drawn(self, shape: ModelShape, row: Variant, *, seed: int, requests: int | None, is_short: bool) -> Load:
        """Sessions. Short requests are all of one session, so that few suffice for a prefix hit."""
        capacity = SYNTHETIC_PAGES * grain_of(shape)
        sessions, count = 1 if is_short else SESSIONS, requests or SYNTHETIC_REQUESTS
        jobs = session_jobs(grain_of(shape), capacity, requests=count, sessions=sessions, seed=seed)
        rivals = rivals_of(jobs, shape.page_size, capacity, count=len(jobs) // RIVAL_SHARE, seed=seed)
        return Load(
            jobs=(*jobs, *(each.job for each in rivals)),
            capacity_tokens=capacity,
            max_running=MAX_RUNNING,
            chunk_tokens=CHUNKS[row["prefill chunk"]](shape.page_size),
            note=f"{len(jobs)} requests of {counted(sessions, 'session')}, {len(rivals)} rivals",
            rivals=rivals,
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
        emit(Modelled(shape.page_size, shape.window if shape.window_layers else 0, bool(shape.state_layers)))
        readers = Readers(early_send=True, replay_every=REPLAY_EVERY)
        row = self.table.variant(variant)
        wanted = "memory" if load.from_trace else row["store"]
        kind = None if wanted == NO_STORE else wanted
        if kind is not None:
            emit(StoreKeeps())
        with faulty_store(kind, lambda key: emit(Damaged(key)), is_faulty=STORE in load.faults) as store:
            # One of the ranks that share a store, beside engines of other models, dtypes and layouts.
            tier = replace(
                host_tier(shape, load, row, store),
                rank=int(row["store rank"]),
                ranks=len(STORE_RANKS),
                has_neighbours=not load.from_trace,
            )
            first = FirstRetracted(emit)
            spared = first.has if self.focus else lambda request: False
            acts = disturber(self.name, load, emit, variant, shape=shape.name, spared=spared, focus=self.focus)
            told = emit if acts is None else acts.noting(emit)
            batch = None if load.from_trace else BATCHES[row["batch"]]
            setup = make_setup(shape, load, backend, told, host=tier, readers=readers, max_running=batch)
            engine = target.build(setup)
            aborts = LoadingAborts() if ABORTS in load.faults else None
            return serve(engine, load, first.note, backend, aborts=aborts, disturber=acts)

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        for what, count in (
            ("load", evidence.loads),
            ("backup", evidence.backups),
            ("device eviction", evidence.device_evictions),
            ("host eviction", evidence.host_evictions),
            ("abort", evidence.aborts),
            ("retraction", evidence.retractions),
            ("resume", evidence.resumes),
        ):
            if not count:
                return f"no {what} happened; use more requests"
        buffers = buffer_names(shape)
        return unread(evidence, buffers | {f"host:{name}" for name in buffers})


class HybridScenario(HiCacheScenario):
    name = "hicache-hybrid"
    families = frozenset({"swa", "mamba"})
    focus = frozenset({"request/running/preempt", "prefix/on the host/match"})
    """Few requests outgrow pools of these families by themselves, and few prefixes of states come back from a host."""

    def _kinds(self) -> dict[str, Iterable[str]]:
        return super()._kinds() | {"host window share": HOST_WINDOW_SHARES}


class FirstRetracted:
    """Requests that the disturber spares, as a pass takes a resume, and an aborted request brings none."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._requests: set[int] = set()
        self._is_over = False

    def has(self, request: int) -> bool:
        return not self._is_over and request in self._requests

    def note(self, event: Event) -> None:
        if isinstance(event, Retracted):
            self._requests.add(event.request)
        self._is_over = self._is_over or isinstance(event, Resumed)
        self._emit(event)


def host_tier(shape: ModelShape, load: Load, row: Variant, store: PageStore | None) -> HostTier:
    ratio = TRACE_HOST_RATIO if load.from_trace else HOST_RATIOS[row["host ratio"]]
    pages = int(pages_for(load.capacity_tokens, shape.page_size) * ratio) | 1
    share = row.values.get("host window share", "all")
    windows = pages // (1 if load.from_trace else HOST_WINDOW_SHARES[share])
    return HostTier(
        units={"full": pages, "window": windows, "state": TRACE_HOST_STATES if load.from_trace else HOST_STATES},
        layout=row["host layout"],
        method=row["copy method"],
        write_policy=row["write policy"],
        order=row["eviction order"],
        ack_period=int(row["ack period"]),
        store=store,
        ring=int(row["ring"]),
    )
