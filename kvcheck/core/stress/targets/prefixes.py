"""Prefixes: states of cached prefixes and stored objects, and their disturbances.

    Prefixes.standings    candidates for a disturbance
    Prefixes.make_happen  evict, remove, overwrite, as an engine's operator or another engine can
    Prefixes.follow       spontaneous happenings, from the events of the cache; splits, from the tree

Invariants:
- A prefix is named by the hash of its end, an object by its key: both follow from tokens alone.
- The caller of `make_happen` counts it, so nothing is counted here meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

from kvcheck.core.cache.events import Emit, Event, Evicted, LookedUp, TierChanged
from kvcheck.core.cache.hicache.cache import HiCache
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.hicache.node import Node
from kvcheck.core.cache.hicache.storage import Namespace, PageStore
from kvcheck.core.cache.hicache.storage_tier import StoredUnit
from kvcheck.core.stress.targets.target import Standing
from kvcheck.core.stress.workload.events import Answered, Deleted, Happened

PINNED = {
    "device": ("in use", "being backed up", "being loaded"),
    "host": ("being backed up", "being loaded", "being stored"),
}
"""By tier, the states of a prefix that it may not give up."""
KeyOf = Callable[[Namespace, str, bytes], str]
"""See StorageTier.key_of."""


class CachedPrefixes:
    def __init__(self, cache: HiCache, host: HostPool | None, store: PageStore | None, emit: Emit) -> None:
        self._cache = cache
        self._host = host
        self._store = store
        self._emit = emit
        self._stored: dict[str, StoredUnit] = {}  # by key, in the order of the first write
        self._is_told = True
        cache.tree.on_split = self._split

    # States

    def standings(self) -> tuple[Standing, ...]:
        storing = self._storing()
        rows = [Standing("prefix", _state_of(each, storing), _name(each)) for each in self._cache.tree.nodes()]
        return (*rows, *(Standing("object", state, key) for key, state in self._objects().items()))

    def _objects(self) -> dict[str, str]:
        if (storage := self._cache.storage) is None:
            return {}
        self._stored |= {each.key: each for each in storage.writing if each.key not in self._stored}
        states = dict.fromkeys(self._stored, "stored")
        states |= {each.key: "being written" for each in storage.writing}
        return states | {each.key: "being read" for each in storage.reading}

    def _storing(self) -> frozenset[bytes]:
        storage = self._cache.storage
        return frozenset() if storage is None else frozenset(each.hash for each in storage.writing)

    # Happenings that a scenario causes

    def make_happen(self, happening: str, standing: Standing) -> bool:
        with self._untold():
            if standing.subject == "object":
                return self._change_object(happening, str(standing.name))
            node = next((each for each in self._cache.tree.nodes() if _name(each) == standing.name), None)
            if node is None or _state_of(node, self._storing()) != standing.state:
                return False
            if happening == "evict":
                tier = "device" if node.device.is_live else "host"
                return self._answered((tier,), node.chain, self._cache.evict_node(node, tier))
            if happening == "remove":
                return self._answered(("device", "host"), _whole(node), self._cache.remove(node))
            return happening == "pressure" and self._press(standing.state)

    def _answered(self, tiers: tuple[str, ...], chain: tuple[bytes, ...], is_gone: bool) -> bool:
        self._emit(Answered(tiers, chain, is_gone))
        return is_gone

    def _press(self, state: str) -> bool:
        if state in PINNED["device"] and self._cache.evict("full", 1):
            return True
        return state in PINNED["host"] and self._cache.residency.evict_host("full", 1) > 0

    def _change_object(self, happening: str, key: str) -> bool:
        if self._store is None or self._host is None:
            return False
        if happening == "remove":
            is_there = self._store.contains(key)
            self._store.remove(key)
            if (unit := self._unit_of(key)) is not None:
                self._emit(Deleted(unit.space, (unit.hash,)))
            return is_there
        if happening != "overwrite" or (payload := self._payload(key)) is None:
            return False
        self._store.put(key, payload)
        return True

    def _payload(self, key: str) -> bytes | None:
        """The host has it until its write is over, then the store."""
        assert self._store is not None and self._host is not None and self._cache.storage is not None
        for each in self._cache.storage.writing:
            if each.key == key:
                return self._host.pack(each.space, each.unit).numpy().tobytes()
        unit = self._unit_of(key)
        return None if unit is None else self._store.get(key, self._host.unit_bytes(unit.space))

    def _unit_of(self, key: str) -> StoredUnit | None:
        assert self._cache.storage is not None
        return next((each for each in self._cache.storage.reading if each.key == key), self._stored.get(key))

    # Happenings of the cache itself

    def _split(self, node: Node) -> None:
        self._tell(_state_of(node, self._storing()), "split")

    def follow(self, event: Event) -> None:
        if isinstance(event, LookedUp) and not event.device_only:
            self._looked_up(event.chain, event.pages)
        elif isinstance(event, TierChanged) and event.space == "full" and not event.added:
            self._leaving(event.chain)
        elif isinstance(event, Evicted):
            self._evicted(event.tier)

    def _looked_up(self, chain: tuple[bytes, ...], pages: int) -> None:
        found, storing = frozenset(chain[:pages]), self._storing()
        for node in self._cache.tree.nodes():
            if node.chain[-1] in found:
                self._tell(_state_of(node, storing), "match")
        storage = self._cache.storage
        if storage is not None and any(each.hash in chain for each in storage.reading):
            self._tell("being read", "match", subject="object")  # for another request: its own has arrived

    def _leaving(self, chain: tuple[bytes, ...]) -> None:
        node = next((each for each in self._cache.tree.nodes() if each.chain[-1] == chain[-1]), None)
        if node is not None:
            self._tell(_state_of(node, self._storing()), "evict")

    def _evicted(self, tier: str) -> None:
        storing = self._storing()
        states = {_state_of(each, storing) for each in self._cache.tree.nodes() if each.tier(tier).is_live}
        for state in PINNED[tier]:
            if state in states:
                self._tell(state, "pressure")

    def close(self) -> None:
        self._is_told = False

    def _tell(self, state: str, happening: str, *, subject: str = "prefix") -> None:
        if self._is_told:
            self._emit(Happened(subject, state, happening))

    @contextmanager
    def _untold(self) -> Iterator[None]:
        before, self._is_told = self._is_told, False
        try:
            yield
        finally:
            self._is_told = before


def _state_of(node: Node, storing: frozenset[bytes]) -> str:
    if node.loading:
        return "being loaded"
    if node.backing is not None:
        return "being backed up"
    if node.chain[-1] in storing:
        return "being stored"
    if node.device.is_live:
        return "in use" if node.locks else "on both tiers" if node.host.is_live else "on the device"
    return "on the host"


def _whole(node: Node) -> tuple[bytes, ...]:
    return (*node.chain, *(each for child in node.children.values() for each in _whole(child)))


def _name(node: Node) -> str:
    return node.chain[-1].hex()


def others_of(mine: Namespace) -> tuple[Namespace, ...]:
    """Namespaces that differ from `mine` in one field each; not in the page size, by which hashes differ already."""
    others = [replace(mine, model=f"{mine.model}-other"), replace(mine, dtype=f"{mine.dtype}-other")]
    others += [replace(mine, layout=f"{mine.layout}-other")]
    others += [replace(mine, rank=(mine.rank + 1) % mine.ranks)] if mine.ranks > 1 else []
    return tuple(others)


class Neighbours:
    """They serve prompts in turn. unit_bytes: length of an object, by space."""

    def __init__(self, store: PageStore, mine: Namespace, key_of: KeyOf, unit_bytes: Mapping[str, int]) -> None:
        self._store = store
        self._others = others_of(mine)
        self._key_of = key_of
        self._unit_bytes = dict(unit_bytes)

    def serve(self, chain: Sequence[bytes], turn: int) -> None:
        owner = self._others[turn % len(self._others)]
        for each in chain:
            for space, size in self._unit_bytes.items():
                seed = blake2b(f"{owner} {space}".encode() + each).digest()
                self._store.put(self._key_of(owner, space, each), (seed * (size // len(seed) + 1))[:size])
