"""What a prefix tree, its nodes, the layer gate and the end of copies refuse, and what is known of a prefix.

root -- a -- bc      locked to a, once on each tier
     \\-- d
     \\== e == fg     on the host alone
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from litmus.onlooker import Onlooker
from rigs.cache import tokens_of

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.hicache.cache import CacheConfig
from kvcheck.core.cache.hicache.controller import leading_reached
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.hicache.node import Node, SpaceCopy, TierIndices, WindowPages
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree, Tokens

SIZE = 2


def tokens(text: str) -> Tokens:
    return tokens_of(text, SIZE)


def on_host(*ids: int) -> TierIndices:
    tier = TierIndices()
    tier.full = np.array(ids, dtype=np.int64)
    return tier


class Grove:
    """See above."""

    def __init__(self) -> None:
        self.tree = tree = PrefixTree(SIZE)
        self.a = tree.insert(tokens("a"), Offer(full=np.array([1]))).node
        self.bc = tree.insert(tokens("abc"), Offer(full=np.array([1, 2, 3]))).node
        self.d = tree.insert(tokens("d"), Offer(full=np.array([4]))).node
        self.e = self._hosted("e", 0, 0)
        self.fg = self._hosted("efg", 1, 1, 2)
        tree.lock(self.a)
        tree.lock_host(self.a)

    def _hosted(self, text: str, start: int, *ids: int) -> Node:
        node = self.tree.insert_host(tokens(text), start, on_host(*ids))
        assert node is not None
        return node

    def kept(self) -> object:
        nodes = (self.tree.root, self.a, self.bc, self.d, self.e, self.fg)
        return [(each.locks, each.host_locks, len(each.keys), len(each.children), each.last_used) for each in nodes]


def pages(count: int) -> Offer:
    return Offer(full=np.arange(1, count + 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda grove: grove.tree.insert(tokens("abc"), pages(2)),
        lambda grove: grove.tree.insert(tokens("abc"), pages(4)),
        lambda grove: grove.tree.insert(tokens(""), pages(1)),
        lambda grove: grove.tree.unlock(grove.d),
        lambda grove: grove.tree.unlock(grove.bc),
        lambda grove: grove.tree.unlock_host(grove.d),
        lambda grove: grove.tree.unlock_host(grove.bc),
        lambda grove: grove.tree.remove(grove.a),
        lambda grove: grove.tree.remove(grove.tree.root),
    ],
)
def test_a_tree_refuses_what_would_break_it(call: Callable[[Grove], object]) -> None:
    grove = Grove()
    before = grove.kept()
    with pytest.raises(LengthMismatch):
        call(grove)
    assert grove.kept() == before


def test_a_lock_is_released_once() -> None:
    grove = Grove()
    for lock, unlock in ((grove.tree.lock, grove.tree.unlock), (grove.tree.lock_host, grove.tree.unlock_host)):
        lock(grove.bc)
        unlock(grove.bc)
        unlock(grove.a)
        for node in (grove.a, grove.bc):
            with pytest.raises(LengthMismatch):
                unlock(node)
    assert {(each.locks, each.host_locks) for each in (grove.tree.root, grove.a, grove.bc)} == {(0, 0)}


def test_the_root_alone_cannot_be_removed() -> None:
    tree = PrefixTree(SIZE)
    with pytest.raises(LengthMismatch):
        tree.remove(tree.root)


def test_what_is_known_of_a_prompt_that_goes_on() -> None:
    grove = Grove()
    found = [grove.tree.known(tokens(text)) for text in ("abcx", "efgx", "x")]
    assert [(each.node, each.pages, each.servable, each.held["full"]) for each in found] == [
        (grove.bc, 3, 3, [True] * 3),
        (grove.fg, 3, 3, [True] * 3),
        (grove.tree.root, 0, 0, []),
    ]


def test_a_page_that_comes_to_the_host_hangs_below_all_pages_before_it() -> None:
    grove = Grove()
    node = grove.tree.insert_host(tokens("efghi"), 3, on_host(3))
    assert node is not None and node.parent is grove.fg and len(node.keys) == 1
    assert node.chain == grove.tree.chain(tokens("efgh"))[3:] != grove.tree.chain(tokens("h"))


def test_prompts_that_differ_in_one_token_share_no_page_from_there_on() -> None:
    for at in range(3 * SIZE):
        grove = Grove()
        other = tokens("abc").copy()
        other[at] = 10_000 + at
        shared = at // SIZE
        assert grove.tree.device_match(other)[1] == shared
        assert set(grove.tree.chain(other)[shared:]).isdisjoint(grove.tree.chain(tokens("abc")))


def copy_of(hosts: int, devices: int, hashes: int, owners: int) -> SpaceCopy:
    return SpaceCopy("full", np.arange(hosts), np.arange(devices), (b"",) * hashes, np.arange(owners))


def window(held: tuple[bool, ...], *ids: int) -> WindowPages:
    return WindowPages(np.array(held), np.array(ids, dtype=np.int64))


def gate() -> LayerGate:
    return LayerGate(EagerBackend(), lanes=2, layers=1, entries=1)


def done_on(lanes: int) -> None:
    """A layer is queued on so many lanes, of two."""
    gate().layer_done(0, 0, (Lane(0, "h2d"),) * lanes)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (lambda counts=counts: copy_of(*counts), LengthMismatch)
            for counts in ((1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1), (3, 2, 2, 2), (2, 2, 2, 3))
        ),
        (lambda: copy_of(1, 1, 2, 2), LengthMismatch),
        (lambda: window((True, False, True), 1), LengthMismatch),
        (lambda: window((True, False, False), 1, 2), LengthMismatch),
        # ValueError: the length of two lists that one caller makes is stated by a strict zip.
        (lambda: done_on(1), ValueError),
        (lambda: done_on(3), ValueError),
        *(
            (lambda sizes=sizes: LayerGate(EagerBackend(), lanes=1, layers=sizes[0], entries=sizes[1]), LengthMismatch)
            for sizes in ((0, 1), (1, 0), (-1, 3))
        ),
    ],
)
def test_lists_of_other_lengths_are_refused(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_lists_of_as_many_are_accepted() -> None:
    done_on(2)
    assert LayerGate(EagerBackend(), lanes=1, layers=1, entries=1).begin() == 0
    assert CacheConfig(ack_period=1).ack_period == 1
    assert copy_of(2, 2, 2, 2).space == "full"
    given: tuple[np.ndarray, IndexArray] = np.array([True, False, True]), np.array([1, 2])
    made = WindowPages(*given)
    assert not any(each.flags.writeable for each in (made.held, made.ids))
    assert not any(map(np.shares_memory, (made.held, made.ids), given))


def test_nobody_waits_for_a_load_that_the_host_has_seen_finish() -> None:
    onlooker = Onlooker()
    backend = EagerBackend(onlooker)
    gate = LayerGate(backend, lanes=1, layers=1, entries=2)
    gate.consume([0, 1])
    for producer in (0, 1):
        assert gate.begin() == producer
        gate.layer_done(producer, 0, (backend.lane("h2d"),))
    gate.retire(0)
    gate.wait(0, backend.lane("forward"))
    recorded = [row[1] for row in onlooker.told if row[0] == "recorded"]
    assert [row for row in onlooker.told if row[0] == "lane_waited"] == [("lane_waited", recorded[1], "forward")]


def test_what_is_done_behind_a_copy_that_is_not_is_acknowledged_after_it() -> None:
    backend = EagerBackend()
    signals = [backend.signal() for _ in range(4)]
    backend.query = lambda signal: signal is not signals[1]  # type: ignore[method-assign]
    assert leading_reached(backend, [(signals[0],), (signals[2], signals[1]), (signals[3],)]) == 1
