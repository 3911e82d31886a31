"""The builtin target: kvcheck's own implementation, assembled from a table of parts, with observers outside of them."""

from __future__ import annotations

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.hicache.cache import WRITE_POLICIES, CacheConfig, HiCache
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.storage import Namespace
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.request import Request, StepReport
from kvcheck.core.stress.targets.observe import Observer, PaddingCheck, WatchedOffload, reported, sized
from kvcheck.core.stress.targets.pair import PairEngine
from kvcheck.core.stress.targets.prefixes import CachedPrefixes, Neighbours
from kvcheck.core.stress.targets.target import FIXED, Engine, Setup, SpaceCount, Standing, TargetParts, turn_ids
from kvcheck.core.stress.workload.events import Declared, EvictionsCounted, Happened

DEVICE_TURN = 2
HOST_TURN = 7
"""Makes first ids on the host differ from those on the device."""


class BuiltinTarget:
    name = "builtin"
    capabilities = frozenset({"retract-resume", "prefix-tree", "hicache", "metadata", "loopback", "pd-transfer"})

    def __init__(self, parts: TargetParts = FIXED) -> None:
        self._parts = parts

    def build(self, setup: Setup) -> Engine:
        return PairEngine(self._parts, setup) if setup.pair is not None else BuiltinEngine(self._parts, setup)


class BuiltinEngine:
    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        backend, emit = setup.backend, setup.emit
        self._observer = Observer(emit)
        self.pool = parts.pool(
            setup.shape,
            setup.sizes,
            backend=backend,
            emit=self._observer,
            buffers=parts.buffers,
            attention=parts.attention,
        )
        turn_ids(self.pool.allocators.values(), by=DEVICE_TURN)
        self._padding = PaddingCheck(self.pool, emit)
        emit(sized("", self.pool, setup.config))
        decoder = setup.decoder(self.pool, (), {})
        self._observer.inspector = setup.inspector() if setup.inspector is not None else None
        self.host: HostPool | None = None
        self._neighbours: Neighbours | None = None
        self.cache = self._make_cache(parts, setup)
        self._emit = emit
        self._prefixes: CachedPrefixes | None = None
        if self.cache is not None and setup.host is not None:
            self._prefixes = CachedPrefixes(self.cache, self.host, setup.host.store, emit)
            self._observer.prefixes = self._prefixes
        self.scheduler = parts.scheduler(
            SchedulerDeps(
                backend=backend,
                pool=self.pool,
                offload=WatchedOffload(parts.offload(self.pool, backend, emit=self._observer), emit),
                cache=self.cache,
                decoder=decoder,
            ),
            setup.config,
        )

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def submit(self, request: Request) -> None:
        """The request's prompt counts as served by a neighbour before, if there are any."""
        if self._neighbours is not None and self.cache is not None:
            self._neighbours.serve(self.cache.tree.chain(request.prompt), request.request_id)
        self.scheduler.submit(request)

    def abort(self, request_id: int) -> bool:
        return self.scheduler.abort(request_id)

    def standings(self) -> tuple[Standing, ...]:
        rows = tuple(Standing("request", state, request) for request, state in self.scheduler.states().items())
        return rows if self._prefixes is None else (*rows, *self._prefixes.standings())

    def make_happen(self, happening: str, standing: Standing) -> bool:
        if standing.subject in ("prefix", "object"):
            return self._prefixes is not None and self._prefixes.make_happen(happening, standing)
        if standing.subject != "request" or not isinstance(standing.name, int):
            return False
        acts = {"abort": self.abort, "preempt": self.scheduler.preempt}
        return happening in acts and acts[happening](standing.name)

    def step(self) -> StepReport:
        """One round. A retraction for lack of room is reported with the state before it."""
        if self._prefixes is None:
            report = self.scheduler.step()
            self._emit(reported("", report))
            return report
        before = self.scheduler.states()
        report = self.scheduler.step()
        self._emit(reported("", report))
        for request in report.retracted:
            state = "restoring" if request in report.resumed else before.get(request, "")
            if state != "retracted":  # else it was retracted in this round, on request
                self._emit(Happened("request", "restoring" if state == "restoring" else "running", "retract"))
        return report

    def counts(self) -> tuple[SpaceCount, ...]:
        cache = self.cache
        if cache is not None:
            cache.settle()
        rows = [
            SpaceCount(name, each.available, cache.cached("device", name) if cache is not None else 0, each.count)
            for name, each in self.pool.allocators.items()
        ]
        if self.host is not None and cache is not None:
            rows += [
                SpaceCount(each.space, each.available, cache.cached("host", name), each.count)
                for name, each in self.host.allocators.items()
            ]
        if cache is not None:
            # The engine is idle, so no lock may be left: free + cached of them must be their total.
            rows.append(SpaceCount("locks on cached prefixes", 0, 0, cache.locked()))
        return tuple(rows)

    def evictions(self) -> int:
        return self.cache.residency.device_evictions if self.cache is not None else 0

    def close(self) -> None:
        if self._prefixes is not None:
            self._prefixes.close()
        if self.cache is not None:
            self._emit(EvictionsCounted("device", self.cache.residency.device_evictions))
            self._emit(EvictionsCounted("host", self.cache.residency.host_evictions))
            self.cache.close()
        self.scheduler.parts.backend.drain()
        self._padding.look()
        self.scheduler.close()
        if self.host is not None:
            self.host.free()

    def _declared(self, cache: HiCache) -> Declared:
        allocators = [*self.pool.allocators.values(), *(self.host.allocators.values() if self.host is not None else ())]
        return Declared(
            uses=WRITE_POLICIES[cache.config.write_policy],
            orders=tuple(cache.residency.orders.items()),
            units=tuple((each.space, each.count) for each in allocators),
            ack_rounds=cache.config.ack_period,
            load_lanes=cache.controller.load_lanes if cache.controller is not None else (),
        )

    def _make_cache(self, parts: TargetParts, setup: Setup) -> HiCache | None:
        """Two tiers with a host tier; else the device tier, for pools of one paged space."""
        tier = setup.host
        if not setup.share_prefixes or (tier is None and (self.pool.has_window or self.pool.has_state)):
            return None
        controller = None
        config = CacheConfig()
        if tier is not None:
            self.host = HostPool(
                self.pool.specs,
                units=tier.units,
                page_size=self.pool.page_size,
                layout=tier.layout,
                method=tier.method,
                backend=setup.backend,
                emit=self._observer,
            )
            self._observer.host = self.host
            turn_ids(self.host.allocators.values(), by=HOST_TURN)
            config = CacheConfig(
                write_policy=tier.write_policy, order=tier.order, ack_period=tier.ack_period, ring=tier.ring
            )
            controller = parts.controller(self.pool, self.host, setup.backend, ring=config.ring, gate=parts.gate)
        window = setup.shape.window if self.pool.has_window else 0
        tree = parts.tree(self.pool.page_size, window=window, has_state=self.pool.has_state)
        residency = parts.residency(tree, self.pool, self.host, order=config.order, emit=self._observer)
        cache = parts.cache(
            tree,
            residency,
            controller,
            setup.backend,
            config=config,
            emit=self._observer,
            movement=parts.movement,
        )
        setup.emit(self._declared(cache))
        if tier is not None and tier.store is not None and self.host is not None:
            namespace = Namespace(
                model=setup.shape.name,
                dtype=str(setup.shape.kv_dtype),
                layout="units",  # the result of HostPool.pack does not depend on the host's layout
                page_size=setup.shape.page_size,
                rank=tier.rank,
                ranks=tier.ranks,
            )
            if tier.has_neighbours:
                sizes = {spec.name: self.host.unit_bytes(spec.name) for spec in self.pool.specs}
                self._neighbours = Neighbours(tier.store, namespace, parts.storage.key_of, sizes)
            cache.connect(
                parts.storage(
                    residency,
                    self.host,
                    tier.store,
                    namespace,
                    setup.backend,
                    window_pages=pages_for(window - 1, self.pool.page_size) if window else 0,
                    has_state=self.pool.has_state,
                    emit=self._observer,
                )
            )
        return cache
