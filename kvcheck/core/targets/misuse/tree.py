"""Misuse of a prefix tree, its nodes, the layer gate and the settings of a cache.

    scene's tree    root -- [page 0] -- [page 1, page 2]        the first node is locked once on both tiers
                       \\-- [page 3]                             nobody uses it
                       \\-- [page 4] -- [page 5, page 6]         the host alone holds both

Invariants:
- Rows for an engine's own tree take a node that is as the row needs it, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvcheck.core.base.errors import LengthMismatch, UsageError
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.hicache.cache import CacheConfig
from kvcheck.core.cache.hicache.controller import leading_reached
from kvcheck.core.cache.hicache.node import Node, SpaceCopy, Tier, WindowPages
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree, Tokens
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import Scene, StillBackend, ids

TOKENS = np.arange(1 << 12, dtype=np.int64)


class Grove:
    """A tree with a locked path and a free leaf."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.size = scene.page
        self.tree: PrefixTree = scene.parts.tree(self.size)
        self.above = self.tree.insert(self.prompt(1), Offer(full=ids(1))).node
        self.below = self.tree.insert(self.prompt(3), Offer(full=ids(1, 2, 3))).node
        self.leaf = self.tree.insert(TOKENS[self.size :][: self.size], Offer(full=ids(4))).node
        self.hosted = self._hosted(0, 1)
        self.behind = self._hosted(1, 3)
        self.tree.lock(self.above)
        self.tree.lock_host(self.above)

    def prompt(self, pages: int, more: int = 0) -> Tokens:
        """The first tokens of one prompt."""
        return TOKENS[: pages * self.size + more]

    def on_host(self, pages: int) -> Tokens:
        """The first tokens of the prompt that the host holds."""
        return TOKENS[4 * self.size :][: pages * self.size]

    def _hosted(self, start: int, stop: int) -> Node:
        tier = Tier()
        tier.full = np.arange(start, stop, dtype=np.int64)
        node = self.tree.insert_host(self.on_host(stop), start, tier)
        assert node is not None  # what is before it was put there just now
        return node

    def kept(self) -> object:
        """What no refused call may change."""
        return _locks((self.tree.root, self.above, self.below, self.leaf, self.hosted, self.behind))


def _locks(nodes: Iterable[Node]) -> object:
    return tuple((node.locks, node.host_locks, len(node.keys), len(node.children), node.last_used) for node in nodes)


def _offered(pages: int, tokens: int, *, more: int = 0) -> Callable[[Grove], object]:
    """Offer so many pages for so many pages of tokens."""
    return lambda grove: grove.tree.insert(grove.prompt(tokens, more), Offer(full=np.arange(1, pages + 1)))


def _insert_part(grove: Grove) -> bool:
    """Tokens of a page that is not whole need no page."""
    return grove.tree.insert(grove.prompt(3, grove.size - 1), Offer(full=ids(1, 2, 3))).node is grove.below


def _locked(grove: Grove) -> bool:
    """Locks on both tiers, each once."""
    for lock, unlock in ((grove.tree.lock, grove.tree.unlock), (grove.tree.lock_host, grove.tree.unlock_host)):
        lock(grove.below)
        unlock(grove.below)
    return (grove.above.locks, grove.above.host_locks, grove.below.locks, grove.below.host_locks) == (1, 1, 0, 0)


def _removed(grove: Grove) -> bool:
    """A leaf goes and comes back."""
    grove.tree.remove(grove.leaf)
    grove.leaf = grove.tree.insert(TOKENS[grove.size :][: grove.size], Offer(full=ids(4))).node
    return len(grove.tree.root.children) == 3


def _known(grove: Grove) -> bool:
    """What both tiers hold of a prompt that goes on, on one tier and on the other."""
    given = [grove.tree.known(tokens) for tokens in (grove.prompt(4), grove.on_host(4), grove.on_host(0))]
    told = [(each.node, each.pages, each.servable, each.held["full"]) for each in given]
    return told == [
        (grove.below, 3, 3, [True] * 3),
        (grove.behind, 3, 3, [True] * 3),
        (grove.tree.root, 0, 0, []),
    ]


def _behind_two(grove: Grove) -> bool:
    """A page that comes to the host behind two nodes hangs on the second of them, under the hash of all before it."""
    tier = Tier()
    tier.full = ids(3)
    node = grove.tree.insert_host(grove.on_host(5), 3, tier)
    if node is None or node.parent is not grove.behind:
        return False
    grove.tree.remove(node)
    return len(node.keys) == 1 and node.chain == grove.tree.chain(grove.on_host(4))[3:]


def _told_apart(grove: Grove) -> bool:
    """Prompts that differ in one token of their first page share no page, whichever token it is."""
    for at in range(grove.size):
        other = grove.prompt(3).copy()
        other[at] = len(TOKENS) + at
        if grove.tree.device_match(other) != (grove.tree.root, 0):
            return False
        if not set(grove.tree.chain(other)).isdisjoint(grove.tree.chain(grove.prompt(3))):
            return False
    return True


TREE: tuple[Misuse[Grove], ...] = (
    Misuse("insert of one page less than the tokens have", LengthMismatch, _offered(2, 3)),
    Misuse("insert of one page more than the tokens have", LengthMismatch, _offered(4, 3)),
    Misuse("insert of a page for tokens that fill none", LengthMismatch, _offered(1, 0)),
    Misuse("insert of whole pages alone", None, _insert_part),
    Misuse("unlock of a node that is not locked", LengthMismatch, lambda grove: grove.tree.unlock(grove.leaf)),
    Misuse("unlock of a node below a locked one", LengthMismatch, lambda grove: grove.tree.unlock(grove.below)),
    Misuse(
        "unlock_host of a node that is not locked", LengthMismatch, lambda grove: grove.tree.unlock_host(grove.leaf)
    ),
    Misuse(
        "unlock_host of a node below a locked one", LengthMismatch, lambda grove: grove.tree.unlock_host(grove.below)
    ),
    Misuse("lock and unlock", None, _locked),
    Misuse("remove of a node with children", LengthMismatch, lambda grove: grove.tree.remove(grove.above)),
    Misuse("remove of the root", LengthMismatch, lambda grove: grove.tree.remove(grove.tree.root)),
    Misuse("remove of a leaf", None, _removed),
    Misuse("what is known of a prompt that goes on", None, _known),
    Misuse("a page that comes to the host behind two prefixes", None, _behind_two),
    Misuse("prompts that differ in one token", None, _told_apart),
    Misuse(
        "an unknown eviction order",
        UsageError,
        lambda grove: grove.scene.parts.residency(
            grove.tree, grove.scene.pool, None, order="no such order", listener=None
        ),
    ),
    Misuse("an unknown write policy", UsageError, lambda grove: CacheConfig(write_policy="no such policy")),
    Misuse("acknowledgements every 0 rounds", UsageError, lambda grove: CacheConfig(ack_period=0)),
    Misuse("acknowledgements every round", None, lambda grove: CacheConfig(ack_period=1).ack_period == 1),
)


def _copy(lengths: tuple[int, int, int, int]) -> Callable[[Grove], object]:
    """A copy of so many host ids, device ids, hashes and requests."""
    hosts, devices, hashes, owners = lengths

    def made(grove: Grove) -> bool:
        SpaceCopy("full", np.arange(hosts), np.arange(devices), (b"",) * hashes, np.arange(owners))
        return True

    return made


def _window(held: tuple[bool, ...], *pages: int) -> Callable[[Grove], object]:
    return lambda grove: len(WindowPages(np.array(held, dtype=bool), ids(*pages)).ids) == len(pages)


def _frozen(grove: Grove) -> bool:
    """Window pages are read-only copies."""
    given = np.array([True]), ids(1)
    made = WindowPages(*given)
    kept = (made.held, made.ids)
    return not any(each.flags.writeable for each in kept) and not any(map(np.shares_memory, kept, given))


NODES: tuple[Misuse[Grove], ...] = (
    *(
        Misuse(f"a copy of {lengths} host ids, device ids, hashes, requests", LengthMismatch, _copy(lengths))
        for lengths in (
            (1, 2, 2, 2),
            (2, 1, 2, 2),
            (2, 2, 1, 2),
            (2, 2, 2, 1),
            (3, 2, 2, 2),
            (2, 2, 2, 3),
            (1, 1, 2, 2),
        )
    ),
    Misuse("a copy of as many of each", None, _copy((2, 2, 2, 2))),
    Misuse("window pages with an id less than are held", LengthMismatch, _window((True, False, True), 1)),
    Misuse("window pages with an id more than are held", LengthMismatch, _window((True, False, False), 1, 2)),
    Misuse("window pages that nobody can change", None, _frozen),
    Misuse("window pages with an id for each that is held", None, _window((True, False, True), 1, 2)),
)


def _gate(layers: int, entries: int) -> Callable[[Grove], object]:
    return lambda grove: (
        len(grove.scene.parts.gate(grove.scene.backend, lanes=1, layers=layers, entries=entries).ring) > 0
    )


def _armed_twice(grove: Grove) -> bool:
    """A ring of one entry is armed, and again only after its load was seen to finish."""
    gate = grove.scene.parts.gate(grove.scene.backend, lanes=1, layers=1, entries=1)
    first, second = gate.begin(), gate.begin()
    gate.retire(0)
    return (first, second, gate.begin()) == (0, None, 0)


def _armed_in_turn(grove: Grove) -> bool:
    """Each entry of a ring stands for one load until that was seen to finish."""
    gate = grove.scene.parts.gate(grove.scene.backend, lanes=1, layers=1, entries=3)
    armed = [gate.begin() for _ in gate.ring]
    if None in armed or len(set(armed)) < len(armed) or gate.begin() is not None:
        return False
    first = armed[0]
    assert first is not None
    gate.retire(first)
    return gate.begin() == first and gate.begin() is None


def _waits_on_its_lane(grove: Grove) -> bool:
    """A read of a load in flight makes the lane that reads wait, and not the process."""
    backend, lane = grove.scene.backend, Lane(0, "misused")
    gate = grove.scene.parts.gate(backend, lanes=1, layers=1, entries=1)
    producer = gate.begin()
    assert producer is not None
    gate.consume([producer])
    backend.waited.clear()
    gate.wait(0, lane)
    return bool(backend.waited) and set(backend.waited) == {lane}


def _leading(grove: Grove) -> bool:
    """What is done behind a copy that is not is acknowledged after it."""
    backend = StillBackend()
    signals = [backend.signal() for _ in range(4)]
    backend.pending = [signals[1]]
    return leading_reached(backend, [(signals[0],), (signals[2], signals[1]), (signals[3],)]) == 1


def _layer_done(lanes: int) -> Callable[[Grove], object]:
    """A layer is queued on so many lanes, of two."""

    def call(grove: Grove) -> bool:
        gate = grove.scene.parts.gate(grove.scene.backend, lanes=2, layers=1, entries=1)
        with grove.scene.preparing():
            gate.layer_done(0, 0, (Lane(0, "misused"),) * lanes)
        return True

    return call


GATE: tuple[Misuse[Grove], ...] = (
    Misuse("a gate without a layer", LengthMismatch, _gate(0, 1)),
    Misuse("a gate without an entry", LengthMismatch, _gate(1, 0)),
    Misuse("a gate of one layer and one entry", None, _gate(1, 1)),
    Misuse("an entry that is armed while its load runs", None, _armed_twice),
    Misuse("entries that are armed while other loads run", None, _armed_in_turn),
    Misuse("a read that waits for a load", None, _waits_on_its_lane),
    Misuse("a copy that is done behind one that is not", None, _leading),
    # ValueError: the length of two lists that one caller makes is stated by a strict zip.
    Misuse("a layer that is done on one lane of two", ValueError, _layer_done(1)),
    Misuse("a layer that is done on three lanes of two", ValueError, _layer_done(3)),
    Misuse("a layer that is done on both lanes", None, _layer_done(2)),
)


def tree_attempts(scene: Scene) -> list[Attempt]:
    """Of a tree of its own, and of what caches are made from."""
    return on_each((*TREE, *NODES, *GATE), Grove(scene), Grove.kept)


def _with_children(tree: PrefixTree) -> object:
    node = next((each for each in tree.nodes() if each.children), None)
    if node is None:
        return NOT_NOW
    tree.remove(node)
    return None


def _unlocked(tree: PrefixTree, tier: str) -> object:
    """Unlock a node that is not locked on the tier."""
    for node in tree.nodes():
        if not (node.locks if tier == "device" else node.host_locks):
            unlock = tree.unlock if tier == "device" else tree.unlock_host
            unlock(node)
            return None
    return NOT_NOW


LIVE: tuple[Misuse[PrefixTree], ...] = (
    Misuse("remove of a cached prefix that goes on", LengthMismatch, _with_children),
    Misuse("remove of the root", LengthMismatch, lambda tree: tree.remove(tree.root)),
    Misuse("unlock of a cached prefix that nobody locked", LengthMismatch, lambda tree: _unlocked(tree, "device")),
    Misuse("unlock_host of a cached prefix that nobody locked", LengthMismatch, lambda tree: _unlocked(tree, "host")),
    Misuse(
        "insert of a page for tokens that fill none",
        LengthMismatch,
        lambda tree: tree.insert(TOKENS[:0], Offer(full=ids(1))),
    ),
)


def live_attempts(tree: PrefixTree) -> list[Attempt]:
    """Of the engine's own tree."""
    return on_each(LIVE, tree, lambda each: _locks((each.root, *each.root.children.values())))
