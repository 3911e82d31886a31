"""A HiCache over small real pools, whose every page has words of its own, and what reads of it must bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

import numpy as np
import torch

from kvcheck.core.cache.backend.backend import Backend, Operation
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.hicache.cache import CacheConfig, HiCache, Lease
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.eviction import Residency
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Node, TierIndices
from kvcheck.core.cache.hicache.radix_tree import PrefixTree, Tokens
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.oracles.residency import ResidencyOracle
from kvcheck.core.stress.strategies import EagerStrategy, LazyStrategy, RandomStrategy
from kvcheck.core.stress.targets.observe import Observer
from kvcheck.core.stress.workload.events import Modelled
from kvcheck.core.stress.workload.shapes import shape

BACKENDS: dict[str, Callable[[Emit], Backend]] = {
    "eager": EagerBackend,
    "simulated, eager": lambda events: SimulatedBackend(EagerStrategy(), events),
    "simulated, lazy": lambda events: SimulatedBackend(LazyStrategy(), events),
    "simulated, random": lambda events: SimulatedBackend(RandomStrategy(5), events),
}
REQUESTS = 3


def tokens_of(text: str, size: int) -> Tokens:
    return np.repeat(np.array([ord(letter) for letter in text], dtype=np.int64), size)


@lru_cache(maxsize=4096)
def words_of(where: str, key: bytes, dimensions: tuple[int, ...]) -> torch.Tensor:
    """The words of a page or slot: [L, r, W] int64."""
    seed = int.from_bytes(sha256(where.encode() + key).digest()[:8], "little")
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**62), 2**62, dimensions))


@dataclass(slots=True, kw_only=True)
class Rig:
    """One rank. wrong: what a read found that should not be there. words: how many words were read."""

    backend: Backend
    pool: KVPool
    host: HostPool
    tree: PrefixTree
    residency: Residency
    cache: HiCache
    history: History
    watch: Observer
    wrong: list[str] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=dict)
    requests: int = 0

    @property
    def controller(self) -> TransferController:
        assert self.cache.controller is not None
        return self.cache.controller

    def tokens(self, text: str) -> Tokens:
        return tokens_of(text, self.pool.page_size)

    def node(self, text: str) -> Node:
        """The node that ends where the text ends, whichever tier holds it; no lookup is made."""
        keys, node = self.tree.keys(self.tokens(text)), self.tree.root
        while keys:
            node = node.children[keys[0]]
            assert keys[: len(node.keys)] == list(node.keys)
            keys = keys[len(node.keys) :]
        return node

    def nodes(self) -> dict[str, Node]:
        return {text_of(self, node): node for node in self.tree.nodes()}

    # A request's life

    def admit(self, text: str) -> Lease:
        """Open and admit; loads are queued and not started."""
        self.requests += 1
        holding = self.pool.open(self.requests)
        assert holding is not None
        return self.cache.admit(self.tokens(text), holding)

    def run(self, lease: Lease, text: str, *, keep: bool = True) -> None:
        """One pass over the whole text: read what was cached, compute the rest, let others share it."""
        assert self.cache.is_loaded(lease)
        holding, chain = lease.holding, self.tree.chain(self.tokens(text))
        self.cache.prepare([lease])
        self._check_window(holding)
        self._submit(holding, chain, 0, holding.shared, reading=True)
        tokens = len(chain) * self.pool.page_size
        while not self.pool.grow(holding, tokens, query=holding.committed):
            short = self.pool.pages_short(holding, tokens, query=holding.committed)
            freed = sum(self.cache.evict(space, count) for space, count in short.items())
            if not freed and not self.cache.wait_oldest():
                self.cache.start_loads()  # what is queued holds pages until it has been acknowledged
                assert self.cache.wait_oldest(), f"no room for {text}"
        self._submit(holding, chain, holding.shared, len(chain), reading=False)
        self.pool.commit(holding, tokens)
        if keep:
            self.cache.keep(lease, self.tokens(text))
        self.pool.evict_window(holding, tokens)

    def finish(self, lease: Lease, text: str) -> None:
        given = self.cache.finish(lease, self.tokens(text))
        self.pool.close(lease.holding, given=given)

    def abort(self, lease: Lease) -> None:
        self.cache.release(lease)
        self.pool.close(lease.holding)

    def serve(self, text: str) -> int:
        lease = self.admit(text)
        cached = lease.holding.shared
        self.cache.start_loads()
        while not self.cache.is_loaded(lease):
            assert self.cache.wait_oldest()
            self.cache.start_loads()
        self.run(lease, text)
        self.finish(lease, text)
        return cached

    def demote(self, text: str) -> None:
        """Send a text's pages down: every node of it leaves the device, deepest first."""
        self.cache.settle()
        for node in list(self.node(text).path())[:-1]:
            assert node.is_backed
            self.residency.demote(node)

    def spoil(self) -> None:
        """Overwrite all that is free on the device: whoever reads it finds nothing of what was there."""
        self.backend.drain()
        for space, each in self.pool.buffers():
            rows = self.pool.page_size if each.rows is Granularity.TOKEN else 1
            for unit in range(1, self.pool.allocators[space].count + 1):
                if self.pool.allocators[space].owner_of(unit) is None:
                    self.pool.sets[space].write_view(each.name)[:, unit * rows : (unit + 1) * rows].fill_(unit)

    def everything(self) -> list[object]:
        """All that a refused call must leave alone, as plain values."""
        return [
            {text: (n.locks, n.host_locks, values(n.device), values(n.host)) for text, n in self.nodes().items()},
            {name: each.available for name, each in self.pool.allocators.items() if name != "rows"},
            {name: each.available for name, each in self.host.allocators.items()},
            (len(self.controller.backups), len(self.controller.loads)),
        ]

    # What must hold

    def check(self) -> None:
        """Nothing wrong was read, ids are counted right, nodes own their values, and lookups fit what was told."""
        self.backend.drain()
        assert self.wrong == []
        check_counts(self)
        check_values(self)
        assert judge(ResidencyOracle(), self.history) == ()

    def close(self) -> None:
        self.check()
        self.cache.close()
        self.backend.drain()
        assert [*self.tree.nodes()] == []
        for allocators in (self.pool.allocators, self.host.allocators):
            assert {name: each.live for name, each in allocators.items()} == dict.fromkeys(allocators, 0)
        assert not bool(self.pool.tables["full_to_window"].read_view().any())
        assert judge(ResidencyOracle(), self.history) == ()

    def _submit(self, holding: Holding, chain: tuple[bytes, ...], start: int, stop: int, *, reading: bool) -> None:
        """Write or compare the pages [start, stop) of a request, and its state behind the last one."""
        chunks = []
        for space, each in self.pool.buffers():
            owned = self.pool.sets[space]
            layers = range(len(owned.spec.layers))
            view = owned.read_view(each.name, layers, self.pool.forward) if reading else owned.write_view(each.name)
            rows = self.pool.page_size if each.rows is Granularity.TOKEN else 1
            for page, unit in self._units(holding, space, start, stop):
                words = view[:, unit * rows : (unit + 1) * rows]
                wanted = words_of(f"{space}.{each.name}", chain[page], tuple(words.shape))
                where = f"request {holding.request}, {space}.{each.name}, page {page}"
                chunks.append(self._compare(words, wanted, where) if reading else _copy(words, wanted))
        if chunks:
            self.backend.submit(Operation("pass", tuple(chunks)), lane=self.pool.forward)

    def _check_window(self, holding: Holding) -> None:
        """A prefix comes with every window page that the next position sees, and the map leads there."""
        if not self.pool.has_window or holding.committed != holding.shared * self.pool.page_size:
            return
        seen = max(0, holding.committed + 1 - self.pool.shape.window) // self.pool.page_size
        window = holding.window_pages[: holding.shared]
        assert (window[seen:] > 0).all() and not window[:seen].any()
        table, pages = self.pool.tables["full_to_window"].read_view(), holding.pages[seen : holding.shared].copy()

        def look() -> None:
            if table[0, pages].tolist() != window[seen:].tolist():
                self.wrong.append(f"request {holding.request}, window map")

        self.backend.submit(Operation("look", (look,)), lane=self.pool.forward)

    def _units(self, holding: Holding, space: str, start: int, stop: int) -> list[tuple[int, int]]:
        """(logical page, unit) of what a pass touches."""
        if space == "state":
            return [(stop - 1, holding.state_slot)] if stop > start else []
        held = holding.pages if space == "full" else holding.window_pages
        return [(page, int(held[page])) for page in range(start, stop) if held[page] > 0]

    def _compare(self, words: torch.Tensor, wanted: torch.Tensor, where: str) -> Callable[[], None]:
        def compare() -> None:
            buffer = where.split(", ")[1]
            self.words[buffer] = self.words.get(buffer, 0) + words.numel()
            if not torch.equal(words, wanted):
                self.wrong.append(where)

        return compare


def _copy(words: torch.Tensor, wanted: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        words.copy_(wanted)

    return copy


def values(tier: TierIndices) -> list[list[int]]:
    return [tier.ids(space).tolist() for space in ("full", "window", "state")]


def text_of(rig: Rig, node: Node) -> str:
    keys = [key for each in reversed([*node.path()]) for key in each.keys]
    return "".join(chr(np.frombuffer(key, dtype=np.int64)[0]) for key in keys)


def check_counts(rig: Rig) -> None:
    """Live ids are those that nodes and open holdings have, each once; evictable and locked ones add up."""
    for space in ("full", "window", "state"):
        for tier, allocators in (("device", rig.pool.allocators), ("host", rig.host.allocators)):
            if space not in allocators:
                continue
            held = [int(i) for n in rig.tree.nodes() for i in (n.device if tier == "device" else n.host).ids(space)]
            assert len(set(held)) == len(held) == rig.cache.cached(tier, space), (tier, space, held)
            for each in held:
                assert allocators[space].owner_of(each) is not None, (tier, space, each)
        protected = sum(len(node.device.ids(space)) for node in rig.tree.nodes() if node.locks)
        assert rig.cache.evictable(space) + protected == rig.cache.cached("device", space)


def check_values(rig: Rig) -> None:
    """Index values are owned, read-only and one a page; nodes hang together on both tiers."""
    seen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for node in rig.tree.nodes():
        assert node.parent is not None
        for tier in (node.device, node.host):
            assert len(node.keys) == len(node.chain)
            if tier.full is not None:
                assert len(tier.full) == len(node.keys)
            if tier.window is not None:
                assert len(tier.window.held) == len(node.keys) and not tier.window.held.flags.writeable
            for value in (tier.full, tier.window and tier.window.ids):
                if value is None:
                    continue
                assert value.dtype == np.int64
                assert value.base is None and not value.flags.writeable
                assert not any(np.shares_memory(value, other) for other in seen)
                seen.append(value)
            assert tier.is_live or (tier.window is None and tier.state is None)
        assert node.device.is_live or node.is_backed
        assert node.parent.device.is_live or not node.device.is_live
        below = node.children.values()
        assert node.locks >= sum(child.locks for child in below)
        assert node.host_locks >= sum(child.host_locks for child in below)


def rig_of(
    name: str = "llama-3-tiny",
    backend: str | Backend = "eager",
    *,
    layout: str = "layer-first",
    method: str = "kernel",
    pages: int = 8,
    window_pages: int = 8,
    states: int = 4,
    host_pages: int = 12,
    host_window: int = 12,
    host_states: int = 6,
    agree: Callable[[int], int] = int,
    history: History | None = None,
    cache_type: type[HiCache] = HiCache,
    **config: object,
) -> Rig:
    """A cache over a pool of a tiny shape. config: fields of CacheConfig."""
    history = history or History(keep=True)
    on = BACKENDS[backend](history.emit) if isinstance(backend, str) else backend
    preset = shape(name)
    sizes = PoolSizes(
        pages=pages,
        requests=REQUESTS,
        max_tokens=pages * preset.page_size,
        window_pages=window_pages,
        state_slots=REQUESTS + states,
    )
    watch = Observer(history.emit)
    pool = KVPool(preset, sizes, backend=on, emit=watch)
    host = HostPool(
        pool.specs,
        units={"full": host_pages, "window": host_window, "state": host_states},
        page_size=preset.page_size,
        layout=layout,
        method=method,
        backend=on,
        emit=watch,
    )
    settings = CacheConfig(**config)  # type: ignore[arg-type]
    window = preset.window if pool.has_window else 0
    history.emit(Modelled(preset.page_size, window, pool.has_state))
    tree = PrefixTree(preset.page_size, window=window, has_state=pool.has_state)
    residency = Residency(tree, pool, host, order=settings.order, emit=watch)
    controller = TransferController(pool, host, on, ring=settings.ring)
    cache = cache_type(tree, residency, controller, on, config=settings, agree=agree, emit=watch)
    return Rig(
        backend=on, pool=pool, host=host, tree=tree, residency=residency, cache=cache, history=history, watch=watch
    )
