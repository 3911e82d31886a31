"""StorageTier: stores host pages in a page store after their backup, and prefetches them before an admission.

Invariants:
- A page counts only once its bytes were read and checked, on every rank.
- A published prefix is at most as long as its shortest companion, and its bytes are in the host pages before.
- Pages that did not arrive, or that another request cached meanwhile, are freed. They were never in the tree.
- If a put fails, the host still has the page. If a get fails, the page counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import torch

from kvcheck.core.base.errors import StorageError
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Operation, Signal
from kvcheck.core.cache.events import Emit, Refused, Stored
from kvcheck.core.cache.hicache.controller import leading_reached
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Fetched, Node, SpaceCopy, TierIndices, WindowPages, make_copy, owned
from kvcheck.core.cache.hicache.radix_tree import KnownPrefix, Tokens
from kvcheck.core.cache.hicache.storage import Namespace, PageStore, complete_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUnit:
    """One object of the store and its host unit. hash: of the prefix that ends with it."""

    key: str
    space: str
    unit: int
    hash: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Write:
    node: Node
    units: tuple[StoredUnit, ...]
    done: Signal


@dataclass(slots=True, kw_only=True, eq=False)
class Prefetch:
    """Pages [start, stop) of a request's prompt on their way from the store to the host."""

    request: int
    tokens: Tokens
    objects: tuple[StoredUnit, ...]  # one for each unit
    start: int
    stop: int
    parent: Node  # the locked node that the pages hang below
    units: dict[str, tuple[IndexArray, IndexArray]]  # host ids by space, with the logical page of each
    arrived: dict[str, set[int]] = field(default_factory=dict)  # complete pages, by space
    done: Signal | None = None
    is_wanted: bool = True


# store      backup acknowledged -> pack -> put                     one operation a node, host pages locked
# prefetch   pages that both tiers lack and the store seems to have -> host pages -> get -> unpack
# publish    the longest prefix for which every space arrived whole becomes a node that the host holds
class StorageTier:
    """The storage tier of one rank. window_pages: pages that a window reaches back; 0 without window layers."""

    def __init__(
        self,
        residency: Residency,
        host: HostPool,
        store: PageStore,
        namespace: Namespace,
        backend: Backend,
        *,
        window_pages: int,
        has_state: bool,
        agree: Callable[[int], int] = int,
        emit: Emit | None = None,
    ) -> None:
        self.failures = 0
        self._residency = residency
        self._tree = residency.tree
        self._host = host
        self._store = store
        self._namespace = namespace
        self._backend = backend
        self._lane = backend.lane("storage")
        self._agree = agree
        self._emit = emit
        self._policy = {"full": "all"}
        self._windows: dict[str, int] = {}
        if window_pages:
            self._policy["window"], self._windows["window"] = "trailing", window_pages
        if has_state:
            self._policy["state"] = "end"
        self._writes: list[Write] = []
        self._prefetches: list[Prefetch] = []
        self._outcomes: list[tuple[str, bool, StoredUnit]] = []  # (space, put or got whole, object), in its order

    # In transfer

    @property
    def writing(self) -> tuple[StoredUnit, ...]:
        return tuple(each for write in self._writes for each in write.units)

    @property
    def reading(self) -> tuple[StoredUnit, ...]:
        return tuple(each for prefetch in self._prefetches for each in prefetch.objects)

    # Down

    def store(self, node: Node, request: int) -> None:
        """Queue the host pages of a node, once, and pin them. (mutant: put-without-pin)"""
        if node.stored or not node.host.is_live:
            return
        stored: list[StoredUnit] = []
        reads = []
        for space in self._policy:
            units = node.host.ids(space)
            if not len(units):
                continue
            for unit, each in zip(units.tolist(), node.host.hashes(node.chain, space), strict=True):
                stored.append(self._stored_unit(space, unit, each))
            names = self._names(space)
            reads.append(self._host.footprint(space, names, units, layers=(0, self._layers(space)), owners=request))
        node.stored = True
        self._tree.lock_host(node)
        chunks = tuple(partial(self._put, each) for each in stored)
        done = self._backend.submit(Operation("storage.put", chunks, request), lane=self._lane, reads=reads)
        self._writes.append(Write(node=node, units=tuple(stored), done=done))

    def _put(self, each: StoredUnit) -> None:
        payload = self._host.pack(each.space, each.unit).numpy().tobytes()
        try:
            self._store.put(each.key, payload)
            self._outcomes.append((each.space, True, each))
        except StorageError:
            self.failures += 1  # the host still has the page

    # Up

    def begin(self, tokens: Tokens, request: int) -> None:
        if any(each.request == request for each in self._prefetches):
            return
        chain = self._tree.chain(tokens)
        known = self._tree.known(tokens)
        parent, start = known.node, known.pages
        if start == len(chain) or not (parent.host.is_live and parent.backing is None):
            return
        stop = self._promised(chain, known)
        if stop <= max(start, known.servable):
            return
        self._tree.lock(parent)
        self._tree.lock_host(parent)
        units = self._host_units(chain, start, stop, request)
        if units is None:
            self._tree.unlock(parent)
            self._tree.unlock_host(parent)
            return
        wanted = [
            (page, self._stored_unit(space, unit, chain[page]))
            for space, (ids, pages) in units.items()
            for unit, page in zip(ids.tolist(), pages.tolist(), strict=True)
        ]
        prefetch = Prefetch(
            request=request,
            tokens=tokens.copy(),
            objects=tuple(each for _, each in wanted),
            start=start,
            stop=stop,
            parent=parent,
            units=units,
        )
        chunks = [partial(self._get, prefetch, page, each) for page, each in wanted]
        writes = [
            self._host.footprint(space, self._names(space), ids, layers=(0, self._layers(space)), owners=request)
            for space, (ids, _) in units.items()
        ]
        prefetch.done = self._backend.submit(
            Operation("storage.get", tuple(chunks), request), lane=self._lane, writes=writes
        )
        self._prefetches.append(prefetch)

    def is_fetching(self, request: int) -> bool:
        return any(each.request == request and each.is_wanted for each in self._prefetches)

    def forget(self, request: int) -> None:
        """Free the pages that arrive for an aborted request. (mutant: aborted-fetch-forgotten)"""
        for each in self._prefetches:
            each.is_wanted = each.is_wanted and each.request != request

    def _get(self, prefetch: Prefetch, page: int, each: StoredUnit) -> None:
        payload = None
        try:
            payload = self._store.get(each.key, self._host.unit_bytes(each.space))
        except StorageError:
            self.failures += 1  # the page has not arrived, and will be computed
        if payload is None:
            self._outcomes.append((each.space, False, each))
        else:
            self._host.unpack(each.space, each.unit, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            prefetch.arrived.setdefault(each.space, set()).add(page)

    def _promised(self, chain: Sequence[bytes], known: KnownPrefix) -> int:
        """Length of the longest prefix that tree and store seem to have, companions included."""
        has = {
            space: known.held[space]
            + [self._on_all(self._contains(self.key_of(self._namespace, space, each))) for each in chain[known.pages :]]
            for space in self._policy
        }
        return complete_prefix(has, policy=self._policy, window_pages=self._windows)

    @staticmethod
    def key_of(namespace: Namespace, space: str, chain: bytes) -> str:
        """The key of an owner's page. (mutants: key-forgets-dtype, key-forgets-rank)"""
        return namespace.key(space, chain)

    def _stored_unit(self, space: str, unit: int, chain: bytes) -> StoredUnit:
        return StoredUnit(key=self.key_of(self._namespace, space, chain), space=space, unit=unit, hash=chain)

    def _contains(self, key: str) -> bool:
        try:
            return self._store.contains(key)
        except StorageError:
            self.failures += 1
            return False

    def _host_units(
        self, chain: Sequence[bytes], start: int, stop: int, request: int
    ) -> dict[str, tuple[IndexArray, IndexArray]] | None:
        """Allocate host ids for all units of pages [start, stop) to be fetched, all or none."""
        wanted = {"full": np.arange(start, stop)}
        if "window" in self._policy:
            wanted["window"] = np.arange(max(start, stop - self._windows["window"]), stop)
        if "state" in self._policy:
            wanted["state"] = np.array([stop - 1])
        units: dict[str, tuple[IndexArray, IndexArray]] = {}
        for space, pages in wanted.items():
            allocator = self._host.allocators[space]
            if allocator.available < len(pages):
                self._residency.evict_host(space, len(pages) - allocator.available)
            ids = allocator.allocate(len(pages), request)
            if ids is None:
                if self._emit is not None:
                    self._emit(Refused("prefetch", request, space, tuple(chain[page] for page in pages.tolist())))
                for name, (taken, _) in units.items():
                    self._host.allocators[name].free(taken)
                return None
            units[space] = (ids, pages)
        return units

    # Acknowledgement

    def poll(self) -> None:
        for _ in range(self._agree(self._finished([each.done for each in self._writes]))):
            self._written(self._writes.pop(0))
        signals = [each.done for each in self._prefetches if each.done is not None]
        for _ in range(self._agree(self._finished(signals))):
            self._publish(self._prefetches.pop(0))

    def wait_oldest(self) -> bool:
        """Wait for the oldest fetch, else the oldest write, and acknowledge it; False if there is none."""
        if self._prefetches:
            oldest = self._prefetches.pop(0)
            assert oldest.done is not None
            self._backend.wait(oldest.done)
            self._publish(oldest)
            return True
        if self._writes:
            write = self._writes.pop(0)
            self._backend.wait(write.done)
            self._written(write)
            return True
        return False

    def _written(self, write: Write) -> None:
        self._tree.unlock_host(write.node)
        self._report_stored()

    def _on_all(self, is_so: bool) -> bool:
        return bool(self._agree(int(is_so)))

    def _finished(self, signals: Sequence[Signal]) -> int:
        return leading_reached(self._backend, ((signal,) for signal in signals))

    def _publish(self, prefetch: Prefetch) -> None:
        self._report_stored()
        self._tree.unlock(prefetch.parent)
        self._tree.unlock_host(prefetch.parent)
        for space, (_, pages) in prefetch.units.items():
            arrived = prefetch.arrived.get(space, set())
            prefetch.arrived[space] = {page for page in pages.tolist() if self._on_all(page in arrived)}
        stop = self._arrived(prefetch) if prefetch.is_wanted else prefetch.start
        node = None
        if stop > prefetch.start:
            tier = self._tier(prefetch, stop)
            node = self._tree.insert_host(prefetch.tokens[: stop * self._tree.page_size], prefetch.start, tier)
        kept = stop if node is not None else prefetch.start
        copies: list[SpaceCopy] = []
        chain = self._tree.chain(prefetch.tokens)
        for space, (ids, pages) in prefetch.units.items():
            whole = np.array([page in prefetch.arrived[space] for page in pages.tolist()])
            is_kept = whole & ((pages < kept) if space != "state" else (pages == kept - 1))
            if not is_kept.all():
                self._host.allocators[space].free(ids[~is_kept])
            if is_kept.any():
                places = pages[is_kept].tolist()
                hashes, kept_ids = [chain[page] for page in places], ids[is_kept]
                copies.append(make_copy(space, kept_ids, kept_ids, hashes, owners=prefetch.request))
        if node is not None:
            node.stored = True
            self._residency.gained(node, "host", tuple(self._policy))
        if self._emit is not None:
            self._emit(Fetched(prefetch.request, tuple(copies)))

    def _arrived(self, prefetch: Prefetch) -> int:
        """Length of the longest complete prefix, the tree's own pages included."""
        known = self._tree.known(prefetch.tokens[: prefetch.start * self._tree.page_size])
        if known.pages < prefetch.start:
            return prefetch.start
        has = {
            space: known.held[space]
            + [page in prefetch.arrived.get(space, ()) for page in range(prefetch.start, prefetch.stop)]
            for space in self._policy
        }
        return complete_prefix(has, policy=self._policy, window_pages=self._windows)

    def _tier(self, prefetch: Prefetch, stop: int) -> TierIndices:
        tier = TierIndices()
        count = stop - prefetch.start
        tier.full = owned(prefetch.units["full"][0][:count])
        if "window" in prefetch.units:
            ids, pages = prefetch.units["window"]
            arrived = [page in prefetch.arrived.get("window", ()) and page < stop for page in pages.tolist()]
            tier.window = WindowPages.nothing(count).plus(pages[arrived] - prefetch.start, ids[arrived])
        if "state" in prefetch.units and prefetch.stop == stop:
            tier.state = int(prefetch.units["state"][0][0])
        return tier

    def _report_stored(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for (space, is_whole), run in groupby(outcomes, key=lambda each: each[:2]):
            if self._emit is not None:
                units = [each for _, _, each in run]
                chain, keys = tuple(each.hash for each in units), tuple(each.key for each in units)
                self._emit(Stored(space, chain, is_whole, keys))

    def _names(self, space: str) -> list[str]:
        return [buffer.name for buffer in self._residency.pool.sets[space].spec.buffers]

    def _layers(self, space: str) -> int:
        return len(self._residency.pool.sets[space].spec.layers)
