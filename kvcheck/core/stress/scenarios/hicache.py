"""hicache: prefixes go down to the host and come back, layer by layer, while others decode.

Invariants:
- Device and host pool are both smaller than the working set: nodes leave the device, and the host, and come back.
- Layout, copy method, write policy, eviction order and acknowledgement period go through all their values, by the
  number of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcheck.core.backend.backend import Backend
from kvcheck.core.hicache.cache import WRITE_POLICIES
from kvcheck.core.hicache.eviction import EVICTION_ORDERS
from kvcheck.core.hicache.host_pool import COPY_METHODS, HOST_LAYOUTS
from kvcheck.core.hicache.memory_store import MemoryStore
from kvcheck.core.paging import pages_for
from kvcheck.core.pools import POOLS
from kvcheck.core.pools.shape import ModelShape
from kvcheck.core.record import Evidence
from kvcheck.core.stress.history import History
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.serving import make_setup, reference_outputs, serve, trace_load
from kvcheck.core.targets.target import HostTier, Target
from kvcheck.core.workload.readers import Readers
from kvcheck.core.workload.sessions import session_jobs

SYNTHETIC_PAGES = 14
SYNTHETIC_REQUESTS = 40
SESSIONS = 9
"""A multiple of the priorities, so that a session keeps its own."""
MAX_RUNNING = 6
TRACE_RUNNING = 8
HOST_RATIOS = (2, 1.25)
"""Host pages for each device page, by the number of the schedule: as engines choose, and too few for the sessions."""
HOST_STATES = 6
REPLAY_EVERY = 4
WORN_EVERY = 11
"""Of so many reads of the store, one finds its object damaged."""


class WornStore(MemoryStore):
    """A store on its last legs: every so many reads it has lost, cut or flipped something by then."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    def get(self, key: str, size: int) -> bytes | None:
        """What is damaged must be refused, and what is lost recomputed."""
        self._reads += 1
        if self._reads % WORN_EVERY == 0 and self.contains(key):
            kind = self._reads // WORN_EVERY % 3
            if kind == 0:
                self.corrupt(key, at=self._reads % size)
            elif kind == 1:
                self.truncate(key, size=self._reads % size)
            else:
                self.drop(key)
        return super().get(key, size)


class HiCacheScenario:
    """Requests that come back to prefixes which have left the device, or both tiers."""

    name = "hicache"
    needs = frozenset({"hicache", "metadata"})
    families = frozenset({"mha", "mla", "nsa"})

    def load(self, shape: ModelShape, *, seed: int, requests: int | None, trace: str | None) -> Load:
        """Sessions, or a trace scaled to the device pool."""
        if trace is None:
            capacity = SYNTHETIC_PAGES * shape.page_size
            jobs = session_jobs(
                shape.page_size, capacity, requests=requests or SYNTHETIC_REQUESTS, sessions=SESSIONS, seed=seed
            )
            note = f"{len(jobs)} requests of {SESSIONS} sessions"
            return Load(jobs=jobs, capacity_tokens=capacity, max_running=MAX_RUNNING, note=note)
        return trace_load(shape, trace, seed=seed, requests=requests, max_running=TRACE_RUNNING)

    def reference(self, shape: ModelShape, load: Load, transport: str) -> Mapping[int, tuple[int, ...]]:
        """A run with room for everything, and no cache."""
        return reference_outputs(shape, load, transport)

    def run(
        self,
        target: Target,
        shape: ModelShape,
        load: Load,
        *,
        backend: Backend,
        history: History,
        transport: str,
        variant: int,
    ) -> int:
        """Feed jobs by their arrival rounds until all have finished, then close."""
        tier = host_tier(shape, load, variant)
        readers = Readers(early_send=True, replay_every=REPLAY_EVERY)
        engine = target.build(make_setup(shape, load, backend, history, transport, host=tier, readers=readers))
        return serve(engine, load, history, backend, aborts_loading=True)

    def missing(self, evidence: Evidence, shape: ModelShape) -> str | None:
        """Loads, evictions on both tiers, and words of every buffer on both."""
        for what, count in (
            ("load", evidence.loads),
            ("backup", evidence.backups),
            ("device eviction", evidence.device_evictions),
            ("host eviction", evidence.host_evictions),
            ("abort", evidence.aborts),
        ):
            if not count:
                return f"no {what} happened; use more requests"
        buffers = {buffer.name for spec in POOLS.load(shape.family)(shape) for buffer in spec.buffers}
        wanted = buffers | {f"host:{name}" for name in buffers} | {"metadata"}
        unread = sorted(name for name in wanted if not evidence.words_verified.get(name))
        return f"no word of {', '.join(unread)} was verified" if unread else None


class HybridScenario(HiCacheScenario):
    """The same for families whose prefixes carry companions: window pages, recurrent states."""

    name = "hicache-hybrid"
    families = frozenset({"swa", "mamba"})


def host_tier(shape: ModelShape, load: Load, variant: int) -> HostTier:
    """The host tier of a schedule. Its number goes through all settings; 0 and 1 are write-through and least recent."""
    pages = int(pages_for(load.capacity_tokens, shape.page_size) * HOST_RATIOS[variant % 2])
    return HostTier(
        units={"full": pages, "window": pages, "state": HOST_STATES},
        layout=HOST_LAYOUTS[variant % 3],
        method=COPY_METHODS[variant // 3 % 2],
        write_policy=list(WRITE_POLICIES)[variant // 2 % 3],
        order=list(EVICTION_ORDERS)[(variant + variant // 3 + 2) % 3],
        ack_period=(5, 3, 1, 2)[variant % 4],
        store=WornStore() if variant % 2 else None,
        ring=(1, 2, 1, 1, 3)[variant % 5],
    )
