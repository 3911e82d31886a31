"""Residency: who is evicted, what goes and what stays, and that every id is given back once."""

from __future__ import annotations

import numpy as np
import pytest
from rigs.cache import Rig, rig_of

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.events import Evicted, Freed, TierChanged
from kvcheck.core.cache.hicache.eviction import EVICTION_ORDERS
from kvcheck.core.cache.hicache.node import Node, WindowPages, owned
from kvcheck.core.cache.hicache.radix_tree import Offer

OWNER = 7


def taken(rig: Rig, tier: str, space: str, count: int) -> IndexArray:
    ids = (rig.pool if tier == "device" else rig.host).allocators[space].allocate(count, OWNER)
    assert ids is not None
    return ids


def cached(rig: Rig, text: str, *, priority: int = 0, backed: bool = False) -> Node:
    """Insert a sequence with everything the family keeps, giving back what the tree did not take."""
    count = len(text)
    full = taken(rig, "device", "full", count)
    window = taken(rig, "device", "window", count) if rig.pool.has_window else None
    state = int(taken(rig, "device", "state", 1)[0]) if rig.pool.has_state else None
    if window is not None:
        rig.pool.map_window(full, window)
    got = rig.tree.insert(
        rig.tokens(text),
        Offer(full=full, window=None if window is None else WindowPages.of(window), state=state),
        priority=priority,
    )
    rig.pool.allocators["full"].free(full[~got.full])
    if window is not None:
        rig.pool.allocators["window"].free(window[~got.window])
    if state is not None and not got.state:
        rig.pool.allocators["state"].free(np.array([state]))
    for node in [*got.node.path()][:-1] if backed else ():
        back_up(rig, node)
    return got.node


def back_up(rig: Rig, node: Node) -> None:
    """Give a node host ids for everything, as if a backup had ended."""
    if node.host.is_live:
        return
    node.host.full = owned(taken(rig, "host", "full", len(node.keys)))
    if rig.pool.has_window:
        count = len(node.keys)
        node.host.window = WindowPages(np.ones(count, dtype=np.bool_), taken(rig, "host", "window", count))
    if rig.pool.has_state:
        node.host.state = int(taken(rig, "host", "state", 1)[0])


def texts(rig: Rig) -> list[str]:
    return sorted(rig.nodes())


def freed(rig: Rig, space: str) -> list[int]:
    return [
        each for event in rig.history.events if isinstance(event, Freed) and event.space == space for each in event.ids
    ]


# Who goes first


@pytest.mark.parametrize(
    ("order", "first_to_last"),
    [("lru", ["cd", "ef", "ab"]), ("lfu", ["ab", "ef", "cd"]), ("priority", ["ef", "cd", "ab"])],
)
def test_each_order_has_its_own_first_victim_on_both_tiers(order: str, first_to_last: list[str]) -> None:
    """ab is used last and hit least, cd is hit most, ef has the lowest priority of all."""
    rig = rig_of(order=order)
    for text, priority in (("ab", 2), ("cd", 1), ("ef", 0)):
        cached(rig, text, priority=priority)
    for text, times in (("cd", 3), ("ef", 2), ("ab", 1)):
        for _ in range(times):
            rig.tree.match(rig.tokens(text))
    for text in first_to_last:
        victim = rig.residency.device_victim("full")
        assert victim is rig.node(text)
        back_up(rig, victim)
        rig.residency.demote(victim)
    for text in first_to_last:
        assert rig.residency.host_victim("full") is rig.node(text)
        assert rig.residency.evict_host("full", 1) == 2
    assert texts(rig) == []
    assert set(EVICTION_ORDERS) == {"lru", "lfu", "priority"}


@pytest.mark.parametrize("order", EVICTION_ORDERS)
def test_of_equals_the_one_made_first_goes_first(order: str) -> None:
    rig = rig_of(order=order)
    for text in ("b", "a", "c"):
        cached(rig, text).last_used = 5
    assert rig.residency.device_victim("full") is rig.node("b")
    assert rig.residency.device_victim("full", [rig.node("b")]) is rig.node("a")


def test_pages_leave_the_device_from_the_leaves_and_host_pages_below_them_do_not_count() -> None:
    rig = rig_of()
    cached(rig, "ab")
    leaf = cached(rig, "abcd", backed=True)
    rig.tree.match(rig.tokens("ab"))  # now the parent is the less recent one of neither
    rig.node("ab").last_used = 0
    assert rig.residency.device_victim("full") is leaf
    rig.residency.demote(leaf)
    assert rig.residency.device_victim("full") is rig.node("ab")


def test_host_pages_leave_from_childless_nodes_that_the_device_does_not_hold() -> None:
    rig = rig_of()
    parent = cached(rig, "ab", backed=True)
    leaf = cached(rig, "abcd", backed=True)
    parent.last_used = 0
    assert rig.residency.host_victim("full") is None
    rig.residency.demote(leaf)
    assert rig.residency.host_victim("full") is leaf
    rig.residency.demote(parent)
    assert rig.residency.host_victim("full") is leaf
    rig.residency.drop(leaf)
    assert rig.residency.host_victim("full") is parent


# What is locked stays


def test_a_lock_keeps_a_path_on_the_device_and_a_host_lock_on_the_host() -> None:
    rig = rig_of()
    leaf = cached(rig, "abcd", backed=True)
    other = cached(rig, "ax", backed=True)
    rig.tree.lock(leaf)
    assert rig.residency.evictable("full") == 1
    assert rig.residency.device_victim("full") is other
    rig.residency.demote(other)
    assert rig.residency.device_victim("full") is None
    rig.tree.lock_host(other)
    assert rig.residency.host_victim("full") is None
    assert rig.residency.evict_host("full", 9) == 0
    rig.tree.unlock_host(other)
    assert rig.residency.evict_host("full", 9) == 1
    rig.tree.unlock(leaf)
    assert rig.residency.evictable("full") == 4


@pytest.mark.parametrize(("name", "space"), [("gpt-oss-tiny", "window"), ("qwen3-next-tiny", "state")])
def test_companions_leave_any_unlocked_node_and_none_that_is_locked(name: str, space: str) -> None:
    rig = rig_of(name)
    parent, leaf = cached(rig, "ab", backed=True), cached(rig, "abcd", backed=True)
    parent.last_used, leaf.last_used = 1, 2
    assert rig.residency.device_victim(space) is parent  # an inner node, too
    assert rig.residency.host_victim(space) is parent
    rig.tree.lock(leaf)
    rig.tree.lock_host(leaf)
    assert rig.residency.device_victim(space) is None
    assert rig.residency.host_victim(space) is None
    assert rig.residency.evictable(space) == 0


def test_a_node_cannot_be_dropped_while_the_host_uses_something_at_or_below_it() -> None:
    rig = rig_of()
    parent, leaf = cached(rig, "ab", backed=True), cached(rig, "abcd", backed=True)
    assert not rig.residency.can_drop(parent)  # the leaf is on the device
    rig.residency.demote(leaf)
    assert rig.residency.can_drop(parent)
    rig.tree.lock_host(leaf)
    assert not rig.residency.can_drop(parent)
    rig.tree.unlock_host(leaf)
    leaf.host_locks, leaf.locks = 0, 1
    assert not rig.residency.can_drop(parent)


# What goes and what stays


@pytest.mark.parametrize(("name", "space"), [("gpt-oss-tiny", "window"), ("qwen3-next-tiny", "state")])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_tombstone_keeps_its_pages_and_frees_its_companions_once(name: str, space: str, tier: str) -> None:
    rig = rig_of(name)
    node = cached(rig, "ab", backed=True)
    value, other = (node.device, node.host) if tier == "device" else (node.host, node.device)
    ids, kept = value.ids(space).tolist(), value.ids("full").tolist()
    label = space if tier == "device" else f"host.{space}"
    rig.residency.tombstone(node, tier, space)
    rig.residency.tombstone(node, tier, space)  # there is nothing left to free
    assert freed(rig, label) == ids
    assert (value.ids("full").tolist(), len(value.ids(space)), value.is_live) == (kept, 0, True)
    assert len(other.ids(space)) == len(ids)
    told = [event for event in rig.history.events if isinstance(event, TierChanged)]
    chain = node.chain if space == "window" else node.chain[-1:]
    assert [(e.tier, e.space, e.chain, list(e.ids), e.added) for e in told] == [(tier, space, chain, ids, False)]


def test_window_pages_leave_the_map_before_their_full_pages_are_anybody_elses() -> None:
    rig = rig_of("gpt-oss-tiny")
    node = cached(rig, "abc", backed=True)
    full = node.device.ids("full").tolist()
    mapped = rig.pool.tables["full_to_window"].read_view()[0]
    assert mapped[full].tolist() == node.device.ids("window").tolist()
    assert node.device.window is not None
    row = node.device.window.row()
    rig.pool.allocators["window"].free(row[:1])
    rig.pool.unmap_window(node.device.ids("full")[:1])
    row[0] = 0  # one has left before
    node.device.window = WindowPages.of(row)
    rig.residency.demote(node)
    assert not mapped.any()
    assert sorted(freed(rig, "window")) == [1, 2, 3]
    order = [event.space for event in rig.history.events if isinstance(event, Freed)]
    assert order.index("full") > order.index("window")


def test_host_eviction_stops_when_enough_is_free_and_takes_whole_nodes() -> None:
    rig = rig_of()
    for text in ("ab", "cd", "ef"):
        rig.residency.demote(cached(rig, text, backed=True))
    assert rig.residency.evict_host("full", 0) == 0
    assert rig.residency.evict_host("full", 3) == 4
    assert texts(rig) == ["ef"]
    assert rig.residency.evict_host("full", 9) == 2
    assert rig.residency.host_evictions == 3


# What listeners are told


def test_a_listener_is_told_of_every_node_that_lost_something_and_whether_a_load_was_in_flight() -> None:
    rig = rig_of("gpt-oss-tiny")
    node = cached(rig, "ab", backed=True)
    cached(rig, "x")
    rig.residency.tombstone(node, "host", "window")
    rig.residency.loads_in_flight = lambda: True
    rig.residency.demote(node)
    rig.residency.drop(node)
    rig.residency.loads_in_flight = lambda: False
    rig.residency.drop(rig.node("x"))
    told = [event for event in rig.history.events if isinstance(event, Evicted)]
    assert told == [
        Evicted("host", "window", False),
        Evicted("device", "full", True),
        Evicted("host", "full", True),
        Evicted("device", "full", False),
    ]
    assert (rig.residency.device_evictions, rig.residency.host_evictions) == (2, 2)
