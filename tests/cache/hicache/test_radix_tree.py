"""The prefix tree: literal cases on both tiers, and what it refuses.

Invariants:
- Ids are literal or counted up here; nothing is allocated, so nothing but the tree decides what a match finds.
"""

from __future__ import annotations

import numpy as np
import pytest
from rigs.cache import tokens_of

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.hicache.node import Node, Tier, WindowPages, owned
from kvcheck.core.cache.hicache.radix_tree import Match, Offer, PrefixTree, Taken, Tokens
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


def found(match: Match) -> list[int]:
    """Page ids of a match, those of the host as negative numbers."""
    return [
        each
        for node in match.nodes
        for each in (node.device.ids("full") if node.device.is_live else -node.host.ids("full")).tolist()
    ]


def lookup(tree: PrefixTree, text: str, *, device_only: bool = False) -> list[int]:
    """The ids of the longest prefix, from a match that has to hang together."""
    match = tree.match(tokens(text), device_only=device_only)
    assert match.node is (match.nodes[-1] if match.nodes else tree.root)
    assert [*match.node.path()] == [*reversed(match.nodes), tree.root]
    assert match.pages == sum(len(node.keys) for node in match.nodes)
    pages = found(match)
    assert match.device_pages == sum(each > 0 for each in pages)
    return pages


def sink(node: Node, first: int) -> None:
    """The host has the node under ids `first`, ..., and the device nothing."""
    node.host.full, node.device.full = owned(np.arange(first, first + len(node.keys))), None
    node.host.window, node.device.window = node.device.window, None
    node.host.state, node.device.state = node.device.state, None


# Match


def test_an_empty_tree_matches_nothing_and_says_so_with_its_root() -> None:
    tree = PrefixTree(SIZE)
    match = tree.match(tokens("abc"))
    assert (match.node, match.nodes, match.pages, match.device_pages) == (tree.root, (), 0, 0)


@pytest.mark.parametrize(
    ("text", "matched"),
    [("abc", 3), ("abcd", 3), ("ab", 2), ("a", 1), ("", 0), (".", 0), ("ab.", 2), ("abx", 2), ("xabc", 0), ("ba", 0)],
)
def test_a_match_is_the_longest_prefix_in_whole_pages(text: str, matched: int) -> None:
    tree = PrefixTree(SIZE)
    cached(tree, "abc")
    assert lookup(tree, text) == [1, 2, 3][:matched]
    assert lookup(tree, "abc") == [1, 2, 3]  # whatever was split on the way


def test_tokens_are_compared_one_by_one_within_a_page() -> None:
    tree = PrefixTree(SIZE)
    tree.insert(ids(1, 2, 3, 4), Offer(full=ids(5, 6)))
    assert found(tree.match(ids(1, 2, 3, 5))) == [5]
    assert found(tree.match(ids(1, 3, 3, 4))) == []


def test_a_match_goes_on_where_the_host_holds_what_the_device_does_not() -> None:
    tree = PrefixTree(SIZE)
    cached(tree, "ab")
    lower = cached(tree, "abcd").node
    sink(lower, 23)
    assert lookup(tree, "abcd") == [1, 2, -23, -24]
    assert lookup(tree, "abc") == [1, 2, -23]
    assert lookup(tree, "abcd", device_only=True) == [1, 2]


def test_what_is_on_its_way_to_the_host_is_not_there_yet() -> None:
    tree = PrefixTree(SIZE)
    node = cached(tree, "ab").node
    sink(node, 21)
    node.backing = object()  # type: ignore[assignment]
    assert (node.is_backed, lookup(tree, "ab")) == (False, [])
    node.backing = None
    assert (node.is_backed, lookup(tree, "ab")) == (True, [-21, -22])


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


def test_inserting_takes_what_the_tree_lacks_and_keeps_what_it_has() -> None:
    tree = PrefixTree(SIZE)
    assert cached(tree, "abc", 1).full.tolist() == [True] * 3
    assert cached(tree, "abde", 11).full.tolist() == [False, False, True, True]
    again = cached(tree, "abc", 21)
    assert (again.full.tolist(), again.grown) == ([False] * 3, ())
    last = cached(tree, "abcf", 31)
    assert last.full.tolist() == [False, False, False, True]
    assert last.grown == (last.node,)
    assert [lookup(tree, text) for text in ("abc", "abde", "abcf")] == [[1, 2, 3], [1, 2, 13, 14], [1, 2, 3, 34]]


def test_half_a_page_is_not_cached_and_another_number_of_pages_is_refused() -> None:
    tree = PrefixTree(SIZE)
    tree.insert(tokens("ab."), Offer(full=ids(1, 2)))
    assert lookup(tree, "ab.") == [1, 2]
    for pages in (0, 1, 3):
        with pytest.raises(LengthMismatch, match=f"4 tokens are 2 pages, got {pages}"):
            tree.insert(tokens("cd"), Offer(full=np.arange(1, pages + 1)))
    assert len([*tree.nodes()]) == 1


def test_pages_that_were_computed_again_bring_a_node_back_to_the_device() -> None:
    tree = PrefixTree(SIZE)
    sink(cached(tree, "ab").node, 21)
    taken = cached(tree, "abc", 31, window=window_pages(5, 0, 7))
    assert taken.full.tolist() == [True] * 3
    assert taken.window.tolist() == [True, False, True]
    assert [len(node.keys) for node in taken.grown] == [2, 1]
    assert lookup(tree, "abc", device_only=True) == [31, 32, 33]
    assert taken.grown[0].host.ids("full").tolist() == [21, 22]


def test_the_tree_and_its_callers_do_not_share_index_memory() -> None:
    tree = PrefixTree(SIZE, window=100)
    given, window = ids(1, 2, 3), ids(4, 5, 6)
    node = tree.insert(tokens("abc"), Offer(full=given, window=WindowPages(window > 0, window))).node
    given[:], window[:] = 99, 99
    assert (node.device.ids("full").tolist(), node.device.ids("window").tolist()) == ([1, 2, 3], [4, 5, 6])
    assert node.device.full is not None and node.device.window is not None
    for value in (node.device.full, node.device.window.ids, node.device.window.held):
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 1


def test_every_page_has_the_hash_of_all_pages_up_to_it_however_nodes_were_cut() -> None:
    tree = PrefixTree(SIZE)
    for text in ("abcd", "ab", "abxy"):
        cached(tree, text)
        tree.match(tokens(text[:1]))
    for text in ("abcd", "abxy"):
        chain = [each for node in tree.match(tokens(text)).nodes for each in node.chain]
        assert chain == list(tree.chain(tokens(text))) == list(chain_hashes(tree.keys(tokens(text))))


# The host alone


def test_host_pages_are_hung_below_what_the_host_holds() -> None:
    tree = PrefixTree(SIZE)
    host = Tier()
    host.full = ids(21, 22)
    sink(cached(tree, "ab").node, 11)
    node = tree.insert_host(tokens("abcde"), 2, host)
    assert node is not None
    assert lookup(tree, "abcde") == [-11, -12, -21, -22]
    assert node.chain == tree.chain(tokens("abcd"))[2:]


@pytest.mark.parametrize(("text", "start"), [("abcd", 1), ("abcd", 3), ("abcd", 0), ("xy", 2), ("abcd", 2)])
def test_host_pages_are_refused_where_the_path_is_another_by_now(text: str, start: int) -> None:
    tree = PrefixTree(SIZE)
    cached(tree, "ab")  # on the device alone: the host cannot hang anything below it
    host = Tier()
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


def test_both_halves_of_a_split_keep_the_locks_and_unlocking_reaches_both() -> None:
    tree = PrefixTree(SIZE)
    lower = cached(tree, "abcd").node
    tree.lock(lower)
    tree.lock_host(lower)
    upper = tree.match(tokens("ab")).node
    tree.lock(upper)
    assert [(n.locks, n.host_locks) for n in (upper, lower)] == [(2, 1), (1, 1)]
    tree.unlock(lower)
    tree.unlock_host(lower)
    assert [(n.locks, n.host_locks) for n in (upper, lower, tree.root)] == [(1, 0), (0, 0), (1, 0)]


def test_unlocking_what_is_not_locked_is_refused() -> None:
    tree = PrefixTree(SIZE)
    node = cached(tree, "ab").node
    with pytest.raises(LengthMismatch, match="which is not locked"):
        tree.unlock(node)
    with pytest.raises(LengthMismatch, match="which are not locked"):
        tree.unlock_host(node)
    assert (node.locks, node.host_locks) == (0, 0)


def test_only_a_childless_node_is_removed() -> None:
    tree = PrefixTree(SIZE)
    upper = cached(tree, "ab").node
    lower = cached(tree, "abc").node
    for node in (upper, tree.root):
        with pytest.raises(LengthMismatch, match="which has 1 children"):
            tree.remove(node)
    tree.remove(lower)
    assert [*tree.nodes()] == [upper]
    tree.remove(upper)
    assert lookup(tree, "abc") == []


# Companions


def test_a_prefix_with_states_ends_where_some_tier_has_one() -> None:
    tree = PrefixTree(SIZE, has_state=True)
    first = cached(tree, "ab", state=5)
    second = cached(tree, "abcd", state=6)
    assert (first.state, second.state) == (True, True)
    assert [len(lookup(tree, text)) for text in ("abcd", "abcdx", "abc", "ab", "a")] == [4, 4, 2, 2, 0]
    assert not cached(tree, "abcd", state=9).state
    sink(tree.match(tokens("abcd")).node, 23)
    assert len(lookup(tree, "abcd")) == 4
    assert len(lookup(tree, "abcd", device_only=True)) == 2


# Pages of 2, a window of 5: the position after p pages is 2p and sees 2p - 4 .. 2p, the last two pages.
@pytest.mark.parametrize(
    ("window", "served"),
    [
        ([1, 2, 3, 4], 4),
        ([0, 2, 3, 4], 4),
        ([0, 0, 3, 4], 4),
        ([0, 0, 0, 4], 0),
        ([1, 2, 3, 0], 3),
        ([1, 2, 0, 4], 2),
        ([1, 0, 0, 0], 1),
        ([0, 2, 0, 4], 0),
        ([0, 2, 3, 0], 3),
    ],
)
def test_a_prefix_with_windows_ends_where_all_that_is_seen_is_held(window: list[int], served: int) -> None:
    for cut in range(5):
        tree = PrefixTree(SIZE, window=5)
        cached(tree, "abcd", window=window_pages(*window))
        tree.device_match(tokens("abcd"[:cut]))  # cut into nodes anywhere
        assert len(lookup(tree, "abcd")) == served


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_the_reach_of_a_window_counts_the_next_position_itself(window: int, reach: int) -> None:
    for held in range(5):
        tree = PrefixTree(SIZE, window=window)
        cached(tree, "abcd", window=window_pages(*[0] * (4 - held), *[9] * held))
        assert len(lookup(tree, "abcd")) == (4 if held >= reach else 0), held


def test_window_pages_of_both_tiers_add_up() -> None:
    tree = PrefixTree(SIZE, window=5)
    node = cached(tree, "abcd", window=window_pages(0, 0, 3, 0)).node
    node.host.full, node.host.window = ids(11, 12, 13, 14), window_pages(0, 0, 0, 24)
    assert len(lookup(tree, "abcd")) == 4
    assert len(lookup(tree, "abcd", device_only=True)) == 0


def test_a_state_on_the_host_does_not_end_a_prefix_that_the_device_alone_has_to_serve() -> None:
    tree = PrefixTree(SIZE, has_state=True)
    node = cached(tree, "ab", state=5).node
    node.host.full, node.host.state, node.device.state = ids(11, 12), 7, None
    assert len(lookup(tree, "ab")) == 2
    assert lookup(tree, "ab", device_only=True) == []


def test_window_pages_have_one_id_for_each_page_that_is_held() -> None:
    pages = window_pages(0, 6, 0, 8)
    assert (pages.held.tolist(), pages.ids.tolist()) == ([False, True, False, True], [6, 8])
    more = pages.plus(ids(0, 2), ids(9, 0))  # a host id may be 0
    assert (more.held.all(), more.ids.tolist()) == (True, [9, 6, 0, 8])
    assert more.among(np.array([True, False, True, False])).tolist() == [9, 0]
    assert pages.part(1, 3).row().tolist() == [6, 0]
    with pytest.raises(LengthMismatch, match="expected 2 ids, one a held page; got 1"):
        WindowPages(pages.held, ids(6))
