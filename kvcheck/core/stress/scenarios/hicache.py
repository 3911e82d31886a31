"""hicache: prefixes move to the host and come back, layer by layer, while other requests decode.

Invariants:
- Running requests outgrow the device pool. A cell counts only if some were retracted and resumed beside the tree.
- Device and host pool are both smaller than the working set: nodes leave the device, and the host, and come back.
- Layout, copy method, write policy, eviction order and acknowledgement period go through all their values, by the
  number of the schedule.
"""

from __future__ import annotations

from kvcheck.core.base.paging import pages_for
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.backend import Backend
from kvcheck.core.cache.hicache.cache import WRITE_POLICIES
from kvcheck.core.cache.hicache.eviction import EVICTION_ORDERS
from kvcheck.core.cache.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.cache.hicache.storage import PageStore
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.scenarios.disturber import disturber
from kvcheck.core.stress.scenarios.faulty_store import faulty_store
from kvcheck.core.stress.scenarios.rivals import rivals_of
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.serving import (
    LoadingAborts,
    buffer_names,
    make_setup,
    serve,
    trace_load,
    unread,
)
from kvcheck.core.targets.target import HostTier, Target
from kvcheck.core.workload.events import Emit, Modelled
from kvcheck.core.workload.readers import Readers
from kvcheck.core.workload.sessions import session_jobs

SYNTHETIC_PAGES = 12
SYNTHETIC_REQUESTS = 36
SESSIONS = 9
"""A multiple of the priorities, so that a session keeps its own."""
MAX_RUNNING = 6
TRACE_RUNNING = 8
NARROW_RUNNING = 2
NARROW_TURN = (4, 6)
"""Of so many schedules the fourth, counted from 0, has a small batch: requests that are computed wait to decode."""
HOST_RATIOS = (2, 1.25)
"""Host pages for each device page, by the number of the schedule: as engines choose, and too few for the sessions."""
HOST_WINDOW_SHARES = (1, 3)
"""Host pages for each window page of the host, by half the number of the schedule: enough, and too few for the nodes,
which keep only the window pages of their ends, so that the host gives windows up while it keeps the pages."""
HOST_STATES = 6
TRACE_HOST_STATES = 128
STORES_USED = (None, "memory", None, "files")
"""The store behind the host tier, by the number of the schedule."""
RIVAL_SHARE = 3
"""One rival for so many requests."""
REPLAY_EVERY = 4
TRACE_HOST_RATIO = 16
"""Host pages for each device page of a trace, whose prefixes come back after hundreds of pages: the host is then far
below what the trace touches (1 page in 28 to 40 of the conversation trace), and still serves some of it."""


class HiCacheScenario:
    """Requests that come back to prefixes which have left the device, or both tiers."""

    name = "hicache"
    needs = frozenset({"hicache"})
    families = frozenset({"mha", "mla", "nsa"})

    def load(self, shape: ModelShape, *, seed: int, requests: int | None, trace: str | None) -> Load:
        """Sessions, or a trace scaled to the device pool."""
        if trace is None:
            capacity = SYNTHETIC_PAGES * shape.page_size
            jobs = session_jobs(
                shape.page_size, capacity, requests=requests or SYNTHETIC_REQUESTS, sessions=SESSIONS, seed=seed
            )
            rivals = rivals_of(jobs, shape.page_size, capacity, count=len(jobs) // RIVAL_SHARE, seed=seed)
            note = f"{len(jobs)} requests of {SESSIONS} sessions, {len(rivals)} rivals"
            return Load(
                jobs=(*jobs, *(each.job for each in rivals)),
                capacity_tokens=capacity,
                max_running=MAX_RUNNING,
                note=note,
                rivals=rivals,
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
        variant: int,
    ) -> int:
        """Feed jobs by their arrival rounds until all have finished, then close."""
        emit(Modelled(shape.page_size, shape.window if shape.window_layers else 0, bool(shape.state_layers)))
        readers = Readers(early_send=True, replay_every=REPLAY_EVERY)
        with faulty_store(STORES_USED[variant % 4] if not load.from_trace else "memory") as store:
            tier = host_tier(shape, load, variant, store)
            acts = disturber(self.name, load, emit, variant)
            told = emit if acts is None else acts.noting(emit)
            turn, of = NARROW_TURN
            running = NARROW_RUNNING if variant % of == turn and not load.from_trace else None
            setup = make_setup(shape, load, backend, told, host=tier, readers=readers, max_running=running)
            engine = target.build(setup)
            return serve(engine, load, emit, backend, aborts=LoadingAborts(), disturber=acts)

    def settings(self, variant: int) -> tuple[str, ...]:
        """Layout, copy method, write policy and eviction order of the host tier, and what lies behind it."""
        return (
            f"host layout:{HOST_LAYOUTS[variant % 3]}",
            f"copy method:{COPY_METHODS[variant // 3 % 2]}",
            f"write policy:{_write_policy(variant)}",
            f"eviction order:{_eviction_order(variant)}",
            f"store:{STORES_USED[variant % 4] or 'none'}",
        )

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Loads, evictions on both tiers, retractions, and words of every buffer on both tiers."""
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
    """The same for families whose prefixes also hold window pages or recurrent states."""

    name = "hicache-hybrid"
    families = frozenset({"swa", "mamba"})


def host_tier(shape: ModelShape, load: Load, variant: int, store: PageStore | None) -> HostTier:
    """The host tier of a schedule. Its number goes through all settings; 0 and 1 are write-through and least recent."""
    ratio = TRACE_HOST_RATIO if load.from_trace else HOST_RATIOS[variant % 2]
    pages = int(pages_for(load.capacity_tokens, shape.page_size) * ratio)
    windows = pages // (1 if load.from_trace else HOST_WINDOW_SHARES[variant // 2 % 2])
    return HostTier(
        units={"full": pages, "window": windows, "state": TRACE_HOST_STATES if load.from_trace else HOST_STATES},
        layout=HOST_LAYOUTS[variant % 3],
        method=COPY_METHODS[variant // 3 % 2],
        write_policy=_write_policy(variant),
        order=_eviction_order(variant),
        ack_period=(5, 3, 1, 2)[variant % 4],
        store=store,
        ring=(1, 2, 1, 1, 3)[variant % 5],
    )


def _write_policy(variant: int) -> str:
    return list(WRITE_POLICIES)[variant // 2 % 3]


def _eviction_order(variant: int) -> str:
    return list(EVICTION_ORDERS)[(variant + variant // 3 + 2) % 3]
