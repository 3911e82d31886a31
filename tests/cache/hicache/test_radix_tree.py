"""The prefix tree: literal cases on both tiers, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from rigs.cache import tokens_of

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.hicache.node import Node, TierIndices, WindowPages, owned
from kvcheck.core.cache.hicache.radix_tree import Offer, PrefixTree, Taken, Tokens
from kvcheck.core.cache.hicache.storage import chain_hashes

SIZE = 2


def tokens(text: str) -> Tokens:
    """A page of two equal tokens for a letter; a trailing dot is half a page."""
    whole = tokens_of(text.rstrip("."), SIZE)
    return np.concatenate((whole, np.array([7], dtype=np.int64))) if text.endswith(".") else whole


def ids(*values: int) -> IndexArray:
    return np.array(values, dtype=np.int64)


def window_pages(*row: int) -> WindowPages:
    """One id a page, 0 where the window page is gone."""
    return WindowPages.of(ids(*row))


def cached(
    tree: PrefixTree, text: str, first: int = 1, *, window: WindowPages | None = None, state: int | None = None
) -> Taken:
    """Insert pages `first`, `first` + 1, ..."""
    offer = Offer(full=np.arange(first, first + len(text)), window=window, state=state)
    return tree.insert(tokens(text), offer)


def lookup(tree: PrefixTree, text: str) -> int:
    """Pages of the longest prefix, from a match that has to hang together."""
    match = tree.match(tokens(text))
    assert match.node is (match.nodes[-1] if match.nodes else tree.root)
    assert [*match.node.path()] == [*reversed(match.nodes), tree.root]
    assert match.pages == sum(len(node.keys) for node in match.nodes)
    return match.pages


def sink(node: Node, first: int) -> None:
    """The host has the node under ids `first`, ..., and the device nothing."""
    node.host.full, node.device.full = owned(np.arange(first, first + len(node.keys))), None
    node.host.window, node.device.window = node.device.window, None
    node.host.state, node.device.state = node.device.state, None


# Match


def test_what_is_on_its_way_to_the_host_is_not_there_yet() -> None:
    tree = PrefixTree(SIZE)
    node = cached(tree, "ab").node
    sink(node, 21)
    node.backing = object()  # type: ignore[assignment]
    assert (node.is_backed, lookup(tree, "ab")) == (False, 0)
    node.backing = None
    assert (node.is_backed, lookup(tree, "ab")) == (True, 2)


def test_a_match_marks_what_it_serves_and_nothing_else() -> None:
    tree = PrefixTree(SIZE)
    cached(tree, "abcd")
    tree.match(tokens("ab"), priority=3)
    tree.match(tokens("abx"), priority=1)
    upper = tree.match(tokens("ab")).node
    (lower,) = upper.children.values()
    assert (upper.hits, upper.priority, lower.hits, lower.priority) == (3, 3, 0, 0)
    assert upper.last_used > lower.last_used


def test_the_device_match_ends_where_the_device_does_and_marks_nothing() -> None:
    tree = PrefixTree(SIZE)
    upper = cached(tree, "ab").node
    lower = cached(tree, "abcd").node
    sink(lower, 23)
    used = (upper.hits, upper.last_used)
    assert tree.device_match(tokens("abcd")) == (upper, 2)
    node, pages = tree.device_match(tokens("a"))
    assert (node.keys, pages, tree.device_match(tokens("x"))) == ((tokens("a").tobytes(),), 1, (tree.root, 0))
    assert (upper.hits, upper.last_used) == used


# Insert


def test_half_a_page_is_neither_cached_nor_matched() -> None:
    tree = PrefixTree(SIZE)
    tree.insert(tokens("ab."), Offer(full=ids(1, 2)))
    assert [lookup(tree, text) for text in ("ab.", "a.", ".", "")] == [2, 1, 0, 0]


def test_window_pages_are_taken_where_the_offer_has_them() -> None:
    taken = cached(PrefixTree(SIZE), "abc", window=window_pages(5, 0, 7))
    assert taken.window.tolist() == [True, False, True]


def test_every_page_has_the_hash_of_all_pages_up_to_it_however_nodes_were_cut() -> None:
    tree = PrefixTree(SIZE)
    for text in ("abcd", "ab", "abxy"):
        cached(tree, text)
        tree.match(tokens(text[:1]))
    for text in ("abcd", "abxy"):
        chain = [each for node in tree.match(tokens(text)).nodes for each in node.chain]
        assert chain == list(tree.chain(tokens(text))) == list(chain_hashes(tree.keys(tokens(text))))


# The host alone


@pytest.mark.parametrize(("text", "start"), [("abcd", 1), ("abcd", 3), ("abcd", 0), ("xy", 2), ("abcd", 2)])
def test_host_pages_are_refused_where_the_path_is_another_by_now(text: str, start: int) -> None:
    tree = PrefixTree(SIZE)
    cached(tree, "ab")  # on the device alone: the host cannot hang anything below it
    host = TierIndices()
    host.full = ids(21, 22)
    assert tree.insert_host(tokens(text), start, host) is None
    assert len([*tree.nodes()]) == 1


# Split, lock, remove


def test_a_split_divides_every_value_and_the_state_stays_at_the_end() -> None:
    tree = PrefixTree(SIZE, window=4)
    node = cached(tree, "abcd", 1, window=window_pages(0, 6, 7, 8), state=3).node
    node.host.full, node.host.window, node.host.state = ids(11, 12, 13, 14), window_pages(21, 22, 23, 0), 5
    node.hits, node.priority, node.stored = 4, 2, True
    upper = tree.device_match(tokens("a"))[0]
    assert (node.parent, upper.parent, [*tree.root.children.values()]) == (upper, tree.root, [upper])
    assert [(n.device.ids("full").tolist(), n.host.ids("full").tolist()) for n in (upper, node)] == [
        ([1], [11]),
        ([2, 3, 4], [12, 13, 14]),
    ]
    windows = [each for n in (upper, node) for each in (n.device.window, n.host.window) if each is not None]
    assert [each.row().tolist() for each in windows] == [[0], [21], [6, 7, 8], [22, 23, 0]]
    assert [(n.device.state, n.host.state) for n in (upper, node)] == [(None, None), (3, 5)]
    assert [(n.hits, n.priority, n.stored) for n in (upper, node)] == [(4, 2, True)] * 2


# Companions


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_the_reach_of_a_window_counts_the_next_position_itself(window: int, reach: int) -> None:
    for held in range(5):
        tree = PrefixTree(SIZE, window=window)
        cached(tree, "abcd", window=window_pages(*[0] * (4 - held), *[9] * held))
        assert lookup(tree, "abcd") == (4 if held >= reach else 0), held


def test_companions_of_both_tiers_add_up_and_those_of_the_host_do_not_count_for_the_device_alone() -> None:
    windows = PrefixTree(SIZE, window=5)
    node = cached(windows, "abcd", window=window_pages(0, 0, 3, 0)).node
    node.host.full, node.host.window = ids(11, 12, 13, 14), window_pages(0, 0, 0, 24)
    states = PrefixTree(SIZE, has_state=True)
    node = cached(states, "ab", state=5).node
    node.host.full, node.host.state, node.device.state = ids(11, 12), 7, None
    for tree, text in ((windows, "abcd"), (states, "ab")):
        assert lookup(tree, text) == len(text)
        assert tree.match(tokens(text), device_only=True).pages == 0


def test_window_pages_have_one_id_for_each_page_that_is_held() -> None:
    pages = window_pages(0, 6, 0, 8)
    assert (pages.held.tolist(), pages.ids.tolist()) == ([False, True, False, True], [6, 8])
    more = pages.plus(ids(0, 2), ids(9, 0))  # a host id may be 0
    assert (more.held.all(), more.ids.tolist()) == (True, [9, 6, 0, 8])
    assert more.among(np.array([True, False, True, False])).tolist() == [9, 0]
    assert pages.part(1, 3).row().tolist() == [6, 0]
    with pytest.raises(LengthMismatch, match="expected 2 ids, one a held page; got 1"):
        WindowPages(pages.held, ids(6))
