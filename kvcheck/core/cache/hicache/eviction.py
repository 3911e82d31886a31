"""Residency: which tier holds what of a node; eviction on both tiers.

    device full   device leaves only; backed ones are demoted, others dropped (write-back: backed up first)
    window, state any unlocked node; it keeps its pages and becomes a tombstone
    host full     childless nodes that the device does not hold

Invariants:
- Nothing of a locked node is given back on that tier. (mutants: load-without-pin, write-back-without-pin)
- Every id is given back once, by the tier that holds it, and the node forgets it in the same call. (mutant:
  host-slot-freed-twice)
- A node that the device does not hold is held by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Node, SpaceCopy, Tier
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.pools.pool import KVPool

HELD = ("window", "state", "full")
"""Spaces in the order in which a tier forgets them: the window map is keyed by full pages, so these go last."""

Order = Callable[[Node], tuple[int, ...]]

EVICTION_ORDERS: dict[str, Order] = {
    "lru": lambda node: (node.last_used, node.ordinal),
    "lfu": lambda node: (node.hits, node.last_used, node.ordinal),
    "priority": lambda node: (node.priority, node.last_used, node.ordinal),
}
"""Which node is evicted first: least recently used, least often hit, or of lowest priority."""


class StoreListener(Protocol):
    """Gets the acts of a cache that have to do with its store."""

    def asked(self, *, request: int, chain: tuple[bytes, ...], is_fetching: bool) -> None:
        """The store was asked for a prompt, before its lookup. is_fetching: pages of it are on their way."""

    def fetched(self, *, request: int, copies: tuple[SpaceCopy, ...]) -> None:
        """Pages came from the store into these host pages. The device ids have no meaning here."""

    def stored(self, *, space: str, chain: tuple[bytes, ...], keys: tuple[str, ...], is_whole: bool) -> None:
        """The store has taken these pages or states under these keys, or could not serve them whole."""


class CacheListener(StoreListener, Protocol):
    """Gets the acts of a cache."""

    def looked_up(
        self, *, request: int, chain: tuple[bytes, ...], pages: int, device_pages: int, device_only: bool, priority: int
    ) -> None:
        """A request looked its prompt up: one hash a whole page, pages found, and how many are on the device.

        device_only: pages of the host could not be loaded and were left out.
        """

    def computed(self, *, request: int, chain: tuple[bytes, ...], priority: int) -> None:
        """The first pages of a request have these hashes. It offers them to the tree."""

    def locked(self, *, tier: str, end: bytes, added: bool) -> None:
        """The prefix that ends at this hash is locked on a tier once more, or once less."""

    def wanted(self, *, tier: str, space: str, units: int) -> None:
        """Somebody asked a tier to free so many pages or slots of a space."""

    def chosen(self, *, tier: str, space: str, chain: tuple[bytes, ...], passed: tuple[bytes, ...]) -> None:
        """A node is to lose what a tier holds of it in a space. passed: ends of nodes that were chosen before, and
        could not go."""

    def flushed(self, *, tiers: tuple[str, ...], chain: tuple[bytes, ...]) -> None:
        """Somebody asked for these pages to leave these tiers, whatever the order says; they are about to."""

    def refused(self, *, kind: str, request: int, space: str, chain: tuple[bytes, ...]) -> None:
        """A backup or a prefetch of these pages or this state was given up: the host has no room in that space. A
        snapshot of a state was given up where the device has none."""

    def moving(self, *, number: int, kind: str, copies: tuple[SpaceCopy, ...]) -> None:
        """A transfer was made, with these index values."""

    def tier_changed(self, *, tier: str, space: str, chain: tuple[bytes, ...], ids: IndexArray, added: bool) -> None:
        """A tier now holds, or no longer holds, these pages or this state. chain: [n] hashes, ids: [n]."""

    def transferred(self, *, number: int, kind: str, request: int, copies: tuple[SpaceCopy, ...]) -> None:
        """A backup or a load was acknowledged, with these index values."""

    def evicted(self, *, tier: str, space: str, during_load: bool) -> None:
        """A node lost what a tier held of it. during_load: some load was in flight."""


class Residency:
    """Gives back what nodes hold. orders: the row of EVICTION_ORDERS that each tier keeps to."""

    def __init__(
        self, tree: PrefixTree, pool: KVPool, host: HostPool | None, *, order: str, listener: CacheListener | None
    ) -> None:
        if order not in EVICTION_ORDERS:
            raise UsageError(f"unknown eviction order {order!r}; known: {', '.join(EVICTION_ORDERS)}")
        self.tree = tree
        self.pool = pool
        self.host = host
        self._order = EVICTION_ORDERS[order]
        self.orders = {"device": order, "host": order}
        self._listener = listener
        self.device_evictions = 0
        self.host_evictions = 0
        self.loads_in_flight: Callable[[], bool] = lambda: False

    # What could be given back

    def evictable(self, space: str) -> int:
        """Device pages or slots of a space that unlocked nodes hold."""
        nodes = self.tree.nodes(on_device=True)
        return sum(len(node.device.ids(space)) for node in nodes if not self._is_pinned(node))

    def device_victim(self, space: str, spared: Iterable[Node] = ()) -> Node | None:
        """The node to lose its device pages next."""
        kept = set(spared)
        candidates = [
            node for node in self.tree.nodes(on_device=True) if node not in kept and self.may_leave_device(node, space)
        ]
        return min(candidates, key=self._order, default=None)

    def host_victim(self, space: str) -> Node | None:
        """The node to lose what the host holds of it next."""
        candidates = [node for node in self.tree.nodes() if self.may_leave_host(node, space)]
        return min(candidates, key=self._order, default=None)

    def may_leave_device(self, node: Node, space: str) -> bool:
        """The node has something in a space of the device, and may lose it."""
        return (
            len(node.device.ids(space)) > 0
            and not self._is_pinned(node)
            and (space != "full" or self._is_device_leaf(node))
        )

    def may_leave_host(self, node: Node, space: str) -> bool:
        """The node has something in a space of the host, and may lose it."""
        return (
            len(node.host.ids(space)) > 0
            and not self._is_host_pinned(node)
            and (space != "full" or not (node.children or node.device.is_live or self._is_pinned(node)))
        )

    def may_be_removed(self, node: Node) -> bool:
        """Nothing uses the node, or anything below it, on either tier."""
        return not (self._is_pinned(node) or self._is_host_pinned(node)) and all(
            self.may_be_removed(child) for child in node.children.values()
        )

    # Giving back

    def demote(self, node: Node) -> None:
        """Give back the node's device pages; the host keeps the node."""
        self._leave(node, "device", HELD)
        self._count("device", "full")

    def flush(self, node: Node, tiers: tuple[str, ...]) -> None:
        """Report that a node, with both tiers also all that continues it, goes because somebody asked for it."""
        if self._listener is not None:
            nodes = [node]
            for each in nodes if len(tiers) > 1 else ():
                nodes += each.children.values()
            self._listener.flushed(tiers=tiers, chain=tuple(key for each in nodes for key in each.chain))

    def drop(self, node: Node) -> None:
        """Neither tier holds the node any more, nor what hangs below it on the host."""
        for child in list(node.children.values()):
            self.drop(child)
        for tier in ("device", "host"):
            held = bool(len(node.tier(tier).ids("full")))
            self._leave(node, tier, HELD)
            if held:
                self._count(tier, "full")
        self.tree.remove(node)

    def can_drop(self, node: Node) -> bool:
        """True where the node's host pages and everything below the node are unused."""
        return not self._is_host_pinned(node) and all(
            not self._is_pinned(child) and not child.device.is_live and self.can_drop(child)
            for child in node.children.values()
        )

    def tombstone(self, node: Node, tier: str, space: str) -> None:
        """Give back the window pages or the state that a tier holds of a node; its pages stay."""
        self._leave(node, tier, (space,))
        self._count(tier, space)

    def evict_host(self, space: str, count: int) -> int:
        """Free at least `count` host ids of a space if unlocked nodes allow it; how many were freed."""
        self.tell_wanted("host", space, count)
        freed = 0
        while freed < count and (node := self.host_victim(space)) is not None:
            self.tell_chosen(node, "host", space)
            freed += len(node.host.ids(space))
            if space == "full":
                self.drop(node)
            else:
                self.tombstone(node, "host", space)
        return freed

    def gained(self, node: Node, tier: str, spaces: Iterable[str]) -> None:
        """Report that a tier holds these spaces of a node now."""
        for space in spaces:
            self._tell(node, tier, space, added=True)

    def tell_wanted(self, tier: str, space: str, count: int) -> None:
        """Report that somebody asked a tier to free so many ids of a space."""
        if self._listener is not None:
            self._listener.wanted(tier=tier, space=space, units=count)

    def tell_chosen(self, node: Node, tier: str, space: str, *, passed: Iterable[Node] = ()) -> None:
        """Report that a node is to lose what a tier holds of it in a space. passed: nodes that could not."""
        if self._listener is not None:
            ends = tuple(each.chain[-1] for each in passed)
            self._listener.chosen(tier=tier, space=space, chain=node.chain, passed=ends)

    def _leave(self, node: Node, tier: str, spaces: Iterable[str]) -> None:
        """Give a tier's ids back and forget them."""
        value = node.tier(tier)
        for space in spaces:
            ids = value.ids(space)
            if not len(ids):
                _forget(value, space)
                continue
            self._tell(node, tier, space, added=False)
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
        """True while a request, a load into them or a backup of them uses the node's device pages."""
        return node.locks > 0

    def _is_host_pinned(self, node: Node) -> bool:
        """True while a load from them, a backup into them or a store of them uses the node's host pages."""
        return node.host_locks > 0

    def _count(self, tier: str, space: str) -> None:
        if tier == "device":
            self.device_evictions += 1
        else:
            self.host_evictions += 1
        if self._listener is not None:
            self._listener.evicted(tier=tier, space=space, during_load=self.loads_in_flight())

    def _tell(self, node: Node, tier: str, space: str, *, added: bool) -> None:
        if self._listener is None:
            return
        value = node.tier(tier)
        ids = value.ids(space)
        if not len(ids):
            return
        self._listener.tier_changed(tier=tier, space=space, chain=value.hashes(node.chain, space), ids=ids, added=added)


def _forget(value: Tier, space: str) -> None:
    if space == "state":
        value.state = None
    elif space == "full":
        value.full = None
    else:
        value.window = None
