"""Residency: the tiers that hold a node, and eviction on both.

Invariants:
- A tier frees nothing of a node that is locked there.
- Every id is freed once, by its tier, and the node forgets it in the same call. (mutant: host-slot-freed-twice)
- A node that the device does not hold is held by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.events import Chosen, Emit, Evicted, Flushed, RoomWanted, TierChanged
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Node, TierIndices
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.pools.pool import KVPool

HELD = ("window", "state", "full")
"""Spaces in the order in which a tier frees them: the window map is keyed by full pages, so these go last."""

Order = Callable[[Node], tuple[int, ...]]

EVICTION_ORDERS: dict[str, Order] = {
    "lru": lambda node: (node.last_used, node.ordinal),
    "lfu": lambda node: (node.hits, node.last_used, node.ordinal),
    "priority": lambda node: (node.priority, node.last_used, node.ordinal),
}


# device full   device leaves only; backed ones are demoted, others dropped (write-back: backed up first)
# window, state any unlocked node; it keeps its pages and becomes a tombstone
# host full     childless nodes that the device does not hold
class Residency:
    """Frees the pages of nodes. orders: the row of EVICTION_ORDERS of each tier."""

    def __init__(
        self, tree: PrefixTree, pool: KVPool, host: HostPool | None, *, order: str, emit: Emit | None = None
    ) -> None:
        if order not in EVICTION_ORDERS:
            raise UsageError(f"unknown eviction order {order!r}; known: {', '.join(EVICTION_ORDERS)}")
        self.tree = tree
        self.pool = pool
        self.host = host
        self._order = EVICTION_ORDERS[order]
        self.orders = {"device": order, "host": order}
        self._emit = emit
        self.device_evictions = 0
        self.host_evictions = 0
        self.loads_in_flight: Callable[[], bool] = lambda: False

    # Candidates

    def evictable(self, space: str) -> int:
        nodes = self.tree.nodes(on_device=True)
        return sum(len(node.device.ids(space)) for node in nodes if not self._is_pinned(node))

    def device_victim(self, space: str, spared: Iterable[Node] = ()) -> Node | None:
        kept = set(spared)
        candidates = [
            node for node in self.tree.nodes(on_device=True) if node not in kept and self.may_leave_device(node, space)
        ]
        return min(candidates, key=self._order, default=None)

    def host_victim(self, space: str) -> Node | None:
        candidates = [node for node in self.tree.nodes() if self.may_leave_host(node, space)]
        return min(candidates, key=self._order, default=None)

    def may_leave_device(self, node: Node, space: str) -> bool:
        return (
            len(node.device.ids(space)) > 0
            and not self._is_pinned(node)
            and (space != "full" or self._is_device_leaf(node))
        )

    def may_leave_host(self, node: Node, space: str) -> bool:
        return (
            len(node.host.ids(space)) > 0
            and not self._is_host_pinned(node)
            and (space != "full" or not (node.children or node.device.is_live or self._is_pinned(node)))
        )

    def may_be_removed(self, node: Node) -> bool:
        return not (self._is_pinned(node) or self._is_host_pinned(node)) and all(
            self.may_be_removed(child) for child in node.children.values()
        )

    # Eviction

    def demote(self, node: Node) -> None:
        self._leave(node, "device", HELD)
        self._count("device", "full")

    def flush(self, node: Node, tiers: tuple[str, ...]) -> None:
        """Report that a node is removed on request; with both tiers, also all that continues it."""
        if self._emit is not None:
            nodes = [node]
            for each in nodes if len(tiers) > 1 else ():
                nodes += each.children.values()
            self._emit(Flushed(tiers, tuple(key for each in nodes for key in each.chain)))

    def drop(self, node: Node) -> None:
        for child in list(node.children.values()):
            self.drop(child)
        for tier in ("device", "host"):
            held = bool(len(node.tier(tier).ids("full")))
            self._leave(node, tier, HELD)
            if held:
                self._count(tier, "full")
        self.tree.remove(node)

    def can_drop(self, node: Node) -> bool:
        return not self._is_host_pinned(node) and all(
            not self._is_pinned(child) and not child.device.is_live and self.can_drop(child)
            for child in node.children.values()
        )

    def tombstone(self, node: Node, tier: str, space: str) -> None:
        self._leave(node, tier, (space,))
        self._count(tier, space)

    def evict_host(self, space: str, count: int) -> int:
        """Free at least `count` host ids if unlocked nodes allow it. Return the number freed."""
        self.report_wanted("host", space, count)
        freed = 0
        while freed < count and (node := self.host_victim(space)) is not None:
            self.report_chosen(node, "host", space)
            freed += len(node.host.ids(space))
            if space == "full":
                self.drop(node)
            else:
                self.tombstone(node, "host", space)
        return freed

    def gained(self, node: Node, tier: str, spaces: Iterable[str]) -> None:
        for space in spaces:
            self._report(node, tier, space, added=True)

    def report_wanted(self, tier: str, space: str, count: int) -> None:
        if self._emit is not None:
            self._emit(RoomWanted(tier, space, count))

    def report_chosen(self, node: Node, tier: str, space: str, *, passed: Iterable[Node] = ()) -> None:
        if self._emit is not None:
            self._emit(Chosen(tier, space, node.chain, tuple(each.chain[-1] for each in passed)))

    def _leave(self, node: Node, tier: str, spaces: Iterable[str]) -> None:
        value = node.tier(tier)
        for space in spaces:
            ids = value.ids(space)
            if not len(ids):
                _forget(value, space)
                continue
            self._report(node, tier, space, added=False)
            if tier == "device":
                self._free_device(node, space, ids)
            else:
                self._free_host(space, ids)
            _forget(value, space)

    def _free_device(self, node: Node, space: str, ids: IndexArray) -> None:
        if space == "window" and node.device.full is not None and node.device.window is not None:
            self.pool.unmap_window(node.device.full[node.device.window.held])
        self.pool.allocators[space].free(ids)

    def _free_host(self, space: str, ids: IndexArray) -> None:
        assert self.host is not None
        self.host.allocators[space].free(ids)

    def _is_device_leaf(self, node: Node) -> bool:
        return not any(child.device.is_live for child in node.children.values())

    def _is_pinned(self, node: Node) -> bool:
        return node.locks > 0

    def _is_host_pinned(self, node: Node) -> bool:
        return node.host_locks > 0

    def _count(self, tier: str, space: str) -> None:
        if tier == "device":
            self.device_evictions += 1
        else:
            self.host_evictions += 1
        if self._emit is not None:
            self._emit(Evicted(tier, space, self.loads_in_flight()))

    def _report(self, node: Node, tier: str, space: str, *, added: bool) -> None:
        value = node.tier(tier)
        if self._emit is not None and len(ids := value.ids(space)):
            self._emit(TierChanged(tier, space, value.hashes(node.chain, space), tuple(ids.tolist()), added))


def _forget(value: TierIndices, space: str) -> None:
    if space == "state":
        value.state = None
    elif space == "full":
        value.full = None
    else:
        value.window = None
