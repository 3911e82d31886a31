"""HiCache: the prefix tree over device and host, as a scheduler uses it.

Invariants:
- The pages of a lease's node stay on the device until the lease ends.
- A prefix of a model with recurrent layers is cached only together with its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation
from kvcheck.core.cache.events import Computed, Emit, Locked, LookedUp, Refused, StoreQueried
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.movement import Movement
from kvcheck.core.cache.hicache.node import Node, Transfer, WindowPages
from kvcheck.core.cache.hicache.radix_tree import Match, Offer, PrefixTree, Tokens
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool
from kvcheck.kernels.page_copy import copy_bytes_torch

WRITE_POLICIES: dict[str, int | None] = {"write-through": 1, "write-through-selective": 2, "write-back": None}
"""Uses of a node after which it is backed up; None: only when the device evicts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    write_policy: str = "write-through"  # row of WRITE_POLICIES
    order: str = "lru"  # row of EVICTION_ORDERS
    ack_period: int = 1  # rounds between two polls
    ring: int = 3  # loads in flight at once

    def __post_init__(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            raise UsageError(f"unknown write policy {self.write_policy!r}; known: {', '.join(WRITE_POLICIES)}")
        if self.ack_period < 1:
            raise UsageError(f"ack_period: expected at least 1, got {self.ack_period}")


@dataclass(slots=True, kw_only=True)
class Lease:
    node: Node  # locked for the request
    holding: Holding
    priority: int = 0
    loads: list[Transfer] = field(default_factory=list)  # transfers of pages that it reads
    state_from: Node | None = None  # its state is still to be copied into the request's own slot


# admit     match -> lock -> load back host pages (all or none) -> adopt the pages
# prepare   name the loads that the next pass reads; copy states into the requests' own slots
# keep      a prefix has been computed: the tree takes its pages, a backup may start
# finish    the request ends: the tree takes the pages that it lacks
# poll      acknowledge finished transfers, in order
class HiCache:
    """Device and host tier of one rank; without a controller only the device tier."""

    def __init__(
        self,
        tree: PrefixTree,
        residency: Residency,
        controller: TransferController | None,
        backend: Backend,
        *,
        config: CacheConfig,
        agree: Callable[[int], int] = int,
        emit: Emit | None = None,
        movement: type[Movement] = Movement,
    ) -> None:
        self.tree = tree
        self.residency = residency
        self.controller = controller
        self.config = config
        self._pool: KVPool = residency.pool
        self._backend = backend
        self._emit = emit
        self._rounds = 0
        self.storage: StorageTier | None = None
        self._fetched: set[int] = set()
        self.movement: Movement | None = None
        if emit is not None:
            tree.on_lock = self._report_lock
        if controller is not None:
            residency.loads_in_flight = lambda: bool(controller.loads)
            self.movement = movement(
                residency,
                controller,
                self.evict,
                uses=WRITE_POLICIES[config.write_policy],
                agree=agree,
                emit=emit,
            )

    def connect(self, storage: StorageTier) -> None:
        assert self.movement is not None
        self.storage = storage
        self.movement.on_backed_up = storage.store

    # A request's life

    @property
    def is_deferring(self) -> bool:
        return self.controller is not None and not self.controller.can_load

    def must_defer(self, tokens: Tokens) -> bool:
        """True while no load can start and the prompt has pages on the host alone. Companions loaded without their
        pages wait in the queue of loads instead."""
        return self.is_deferring and self.tree.known(tokens).servable > self.tree.device_match(tokens)[1]

    def admit(self, tokens: Tokens, holding: Holding, *, priority: int = 0) -> Lease:
        self._fetched.discard(holding.request)
        match = self.tree.match(tokens, priority=priority)
        self._report_lookup(tokens, match, holding.request, device_only=False, priority=priority)
        self.tree.lock(match.node)
        if self.movement is not None and not self.movement.load_back(match, holding.request):
            # There is no room to load all of it: serve the device's pages, and load nothing.
            self.tree.unlock(match.node)
            match = self.tree.match(tokens, priority=priority, device_only=True)
            self._report_lookup(tokens, match, holding.request, device_only=True, priority=priority)
            self.tree.lock(match.node)
        lease = Lease(node=match.node, holding=holding, priority=priority)
        lease.loads = list(dict.fromkeys(each for node in match.nodes for each in node.loading))
        self._adopt(holding, match)
        if self._pool.has_state and match.pages:
            lease.state_from = match.node
        if self.movement is not None:
            for node in match.nodes:
                self.movement.back_up_when_due(node, holding.request)
        return lease

    def fetch(self, tokens: Tokens, request: int) -> bool:
        """Fetch, once, the pages of a prompt that only the store has. True once they have arrived."""
        if self.storage is None:
            return True
        if request not in self._fetched:
            self._fetched.add(request)
            self.storage.begin(tokens, request)
            self._report_query(tokens, request, is_fetching=self.storage.is_fetching(request))
        return not self.storage.is_fetching(request)

    def is_fetching(self, request: int) -> bool:
        return self.storage is not None and self.storage.is_fetching(request)

    def forget(self, request: int) -> None:
        """Forget a request that was aborted before admission; if sent again, it queries the store again."""
        self._fetched.discard(request)
        if self.storage is not None:
            self.storage.forget(request)

    def is_loaded(self, lease: Lease) -> bool:
        """True once every load of the lease has started: its pages may be read behind the layer gate."""
        return all(transfer.producer is not None for transfer in lease.loads)

    def prepare(self, leases: Iterable[Lease]) -> None:
        waiting = list(leases)
        for lease in waiting:
            lease.loads = [transfer for transfer in lease.loads if not transfer.acknowledged]
        if self.controller is not None:
            producers = [t.producer for lease in waiting for t in lease.loads if t.producer is not None]
            self.controller.gate.consume(producers)
        for lease in waiting:
            if lease.state_from is not None:
                cached = lease.state_from.device.state
                assert cached is not None  # locked since the admission, or loaded back by it
                self._copy_state(cached, lease.holding.state_slot, lease.holding.request)
                lease.state_from = None

    def keep(self, lease: Lease, tokens: Tokens) -> None:
        holding = lease.holding
        pages = len(tokens) // self._pool.page_size
        node, known = self.tree.device_match(tokens)
        if known == pages > 0 and self._pool.has_state and node.device.state is None:
            self._give_state(node, holding)
        if known != holding.shared or known == pages:
            return  # another request has cached a longer run; this one is offered again at the end
        state = self._snapshot(holding) if self._pool.has_state else None
        if self._pool.has_state and state is None:
            self._report_refused(tokens, holding.request)
            return
        self._report_computed(tokens, holding.request, priority=lease.priority)
        taken = self.tree.insert(tokens, self._offer(holding, pages, state), priority=lease.priority)
        self.tree.lock(taken.node)
        self.tree.unlock(lease.node)
        lease.node = taken.node
        holding.shared = pages
        self._grown(taken.grown, holding.request)

    def finish(self, lease: Lease, tokens: Tokens) -> Given:
        """End a request: insert the pages that the tree lacks, and return those that it took."""
        holding = lease.holding
        pages = len(tokens) // self._pool.page_size
        given = Given.nothing(len(holding.pages))
        if not self._pool.has_state and pages > holding.shared:
            self._report_computed(tokens, holding.request, priority=lease.priority)
            taken = self.tree.insert(tokens, self._offer(holding, pages, None), priority=lease.priority)
            given.full[:pages], given.window[:pages] = taken.full, taken.window
            self._grown(taken.grown, holding.request)
        self.tree.unlock(lease.node)
        return given

    def release(self, lease: Lease) -> None:
        self.tree.unlock(lease.node)

    def drop(self, lease: Lease) -> None:
        """Unlock the lease of a retracted request until it is resumed."""
        self.tree.unlock(lease.node)
        lease.node = self.tree.root
        self.tree.lock(lease.node)
        lease.loads = []
        lease.state_from = None

    # Room

    def evictable(self, space: str) -> int:
        return self.residency.evictable(space)

    def cached(self, tier: str, space: str) -> int:
        return sum(len(node.tier(tier).ids(space)) for node in self.tree.nodes(on_device=tier == "device"))

    def evict(self, space: str, count: int) -> int:
        """Free at least `count` device ids if unlocked nodes allow it. Return the number freed."""
        self.residency.report_wanted("device", space, count)
        freed = 0
        spared: list[Node] = []
        while freed < count and (node := self.residency.device_victim(space, spared)) is not None:
            self.residency.report_chosen(node, "device", space, passed=spared)
            size = len(node.device.ids(space))
            if self._give_up(node, space):
                freed += size
            else:
                spared.append(node)
        return freed

    def evict_node(self, node: Node, tier: str) -> bool:
        """Evict one node from a tier, whatever the order; False if it has to stay."""
        if tier == "device":
            if not self.residency.may_leave_device(node, "full"):
                return False
            self.residency.flush(node, ("device",))
            return self._give_up(node, "full")
        if may_leave := self.residency.may_leave_host(node, "full"):
            self.residency.flush(node, ("host",))
            self.residency.drop(node)
        return may_leave

    def remove(self, node: Node) -> bool:
        """Flush a prefix and all that continues it from both tiers; False if any of it is in use."""
        if may_go := self.residency.may_be_removed(node):
            self.residency.flush(node, ("device", "host"))
            self.residency.drop(node)
        return may_go

    def _give_up(self, node: Node, space: str) -> bool:
        if space != "full":
            self.residency.tombstone(node, "device", space)
        elif node.is_backed or self._write_back(node):
            self.residency.demote(node)
        elif self.residency.can_drop(node):
            self.residency.drop(node)
        else:
            return False
        return True

    def _write_back(self, node: Node) -> bool:
        if self.movement is None or self.movement.uses is not None or not self.movement.back_up(node, WRITE_BACK):
            return False
        self.movement.wait_for_backups()
        return True

    # Rounds

    def start_loads(self) -> None:
        if self.controller is not None:
            self.controller.start_loads()

    def poll(self) -> bool:
        """Acknowledge finished transfers, every ack_period rounds. True if there was one."""
        self._rounds += 1
        if self.movement is None or self._rounds % self.config.ack_period:
            return False
        if self.storage is not None:
            self.storage.poll()
        return self.movement.poll()

    def wait_oldest(self) -> bool:
        if self.movement is not None and self.movement.wait_oldest():
            return True
        return self.storage is not None and self.storage.wait_oldest()

    def settle(self) -> None:
        self.start_loads()
        while self.wait_oldest():
            self.start_loads()

    def locked(self) -> int:
        return sum(node.locks > 0 or node.host_locks > 0 for node in self.tree.nodes())

    def close(self) -> None:
        self.settle()
        for node in list(self.tree.root.children.values()):
            self.residency.drop(node)

    # Events

    def _report_lock(self, node: Node, tier: str, added: bool) -> None:
        if self._emit is not None and node is not self.tree.root:
            self._emit(Locked(tier, node.chain[-1], added))

    def _report_query(self, tokens: Tokens, request: int, *, is_fetching: bool) -> None:
        if self._emit is not None:
            self._emit(StoreQueried(request, self.tree.chain(tokens), is_fetching))

    def _report_lookup(self, tokens: Tokens, match: Match, request: int, *, device_only: bool, priority: int) -> None:
        if self._emit is not None:
            chain = self.tree.chain(tokens)
            self._emit(LookedUp(request, chain, match.pages, match.device_pages, device_only, priority))

    def _report_computed(self, tokens: Tokens, request: int, *, priority: int) -> None:
        if self._emit is not None:
            self._emit(Computed(request, self.tree.chain(tokens), priority))

    def _report_refused(self, tokens: Tokens, request: int) -> None:
        if self._emit is not None:
            self._emit(Refused("snapshot", request, "state", self.tree.chain(tokens)[-1:]))

    # Between a request and the tree

    def _adopt(self, holding: Holding, match: Match) -> None:
        if not match.pages:
            return
        full = np.concatenate([node.device.ids("full") for node in match.nodes])
        window = np.zeros(0, dtype=np.int64)
        if self._pool.has_window:
            held = [node.device.window or WindowPages.nothing(len(node.keys)) for node in match.nodes]
            window = np.concatenate([each.row() for each in held])
            window[: self._pool.first_seen_page(match.pages * self._pool.page_size)] = 0
        self._pool.adopt(holding, full, window)

    def _offer(self, holding: Holding, pages: int, state: int | None) -> Offer:
        window = None
        if self._pool.has_window:
            row = np.zeros(pages, dtype=np.int64)
            row[: len(holding.window_pages)] = holding.window_pages[:pages]
            window = WindowPages.of(row)
        return Offer(full=holding.pages[:pages], window=window, state=state)

    def _grown(self, grown: Iterable[Node], request: int) -> None:
        for node in grown:
            self.residency.gained(node, "device", ("full", "window", "state"))
            node.hits += 1
            if self.movement is not None:
                self.movement.back_up_when_due(node, request)

    def _give_state(self, node: Node, holding: Holding) -> None:
        node.device.state = self._snapshot(holding)
        self.residency.gained(node, "device", ("state",))

    def _snapshot(self, holding: Holding) -> int | None:
        if self._pool.spare("state") < 1 and not self.evict("state", 1):
            return None
        slots = self._pool.allocators["state"].allocate(1, holding.request)
        if slots is None:
            return None
        self._copy_state(holding.state_slot, int(slots[0]), holding.request)
        return int(slots[0])

    def _copy_state(self, source: int, target: int, request: int) -> None:
        """Copy one state slot to another, in forward-lane order and behind the loads of this pass."""
        # The footprints name no request, because nothing acknowledges the copy: a slot may be freed before it has run,
        # and its next owner writes behind the forward lane.
        owner = self._pool.sets["state"]
        layers = range(len(owner.spec.layers))
        names = tuple(buffer.name for buffer in owner.spec.buffers)
        views = [(owner.read_view(name, layers, self._pool.forward), owner.write_view(name)) for name in names]
        chunks = tuple(partial(copy_bytes_torch, wide[:, target], view[:, source]) for view, wide in views)
        slots = np.array([source, target], dtype=np.int64)
        self._backend.submit(
            Operation("hicache.copy_state", chunks, request),
            lane=self._pool.forward,
            reads=(Footprint("state", names, (0, len(layers)), slots[:1]),),
            writes=(Footprint("state", names, (0, len(layers)), slots[1:]),),
        )


WRITE_BACK = 1
"""The request that a backup on eviction is counted for, since it is no request's own."""
