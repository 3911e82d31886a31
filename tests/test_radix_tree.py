"""The prefix tree: literal cases, and random calls against a table of every prefix that should be cached.

Invariants:
- The model keeps one row for each prefix in whole pages and knows nothing of nodes, splits or edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcheck.core.errors import FreeInFlight, LengthMismatch
from kvcheck.core.hicache.radix_tree import Node, PrefixTree, Tokens
from kvcheck.core.paging import IndexArray
from kvcheck.core.pools.allocator import PageAllocator

SIZE = 2
POOL_PAGES = 24
Path = tuple[str, ...]


def tokens_of(text: str) -> Tokens:
    """One page of two equal tokens for a letter; a trailing dot is half a page."""
    return np.array([ord(each) for letter in text for each in letter * (1 if letter == "." else SIZE)], dtype=np.int64)


def tree_of(pages: int = POOL_PAGES) -> tuple[PrefixTree, PageAllocator]:
    """An empty tree over a pool of pages."""
    allocator = PageAllocator("full", count=pages, page_size=SIZE)
    return PrefixTree(SIZE, allocator), allocator


def cached(tree: PrefixTree, allocator: PageAllocator, text: str) -> IndexArray:
    """Insert a sequence as a finished request does: own pages for all of it, duplicates given back."""
    pages = allocator.allocate(len(tokens_of(text)) // SIZE, 1)
    assert pages is not None
    known = tree.insert(tokens_of(text), pages)
    allocator.free(pages[:known])
    return tree.match(tokens_of(text)).pages


def found(tree: PrefixTree, text: str) -> list[int]:
    """Page ids of the longest cached prefix."""
    return tree.match(tokens_of(text)).pages.tolist()


def test_an_empty_tree_matches_nothing_and_says_so_with_its_root() -> None:
    tree, _ = tree_of()
    match = tree.match(tokens_of("abc"))
    assert match.pages.tolist() == []
    assert match.pages.dtype == np.int64
    assert match.node is tree.root


@pytest.mark.parametrize(
    ("text", "matched"),
    [("abc", 3), ("abcd", 3), ("ab", 2), ("a", 1), ("", 0), (".", 0), ("ab.", 2), ("abx", 2), ("xabc", 0), ("ba", 0)],
)
def test_a_match_is_the_longest_prefix_in_whole_pages(text: str, matched: int) -> None:
    tree, allocator = tree_of()
    pages = cached(tree, allocator, "abc").tolist()
    assert found(tree, text) == pages[:matched]
    assert found(tree, "abc") == pages  # whatever was split on the way
    assert tree.pages_cached == 3


def test_half_a_page_is_not_cached() -> None:
    tree, allocator = tree_of()
    pages = allocator.allocate(2, 1)
    assert pages is not None
    assert tree.insert(tokens_of("ab."), pages) == 0
    assert tree.pages_cached == 2


def test_tokens_are_compared_one_by_one_within_a_page() -> None:
    tree, _ = tree_of()
    tree.insert(np.array([1, 2, 3, 4], dtype=np.int64), np.array([5, 6], dtype=np.int64))
    assert tree.match(np.array([1, 2, 3, 5], dtype=np.int64)).pages.tolist() == [5]
    assert tree.match(np.array([1, 3, 3, 4], dtype=np.int64)).pages.tolist() == []


def test_inserting_returns_how_many_leading_pages_were_cached_and_keeps_those() -> None:
    tree, _ = tree_of()
    assert tree.insert(tokens_of("abc"), np.array([1, 2, 3])) == 0
    assert tree.insert(tokens_of("abde"), np.array([11, 12, 13, 14])) == 2
    assert tree.insert(tokens_of("abc"), np.array([21, 22, 23])) == 3
    assert tree.insert(tokens_of("abcf"), np.array([31, 32, 33, 34])) == 3
    assert found(tree, "abc") == [1, 2, 3]
    assert found(tree, "abde") == [1, 2, 13, 14]
    assert found(tree, "abcf") == [1, 2, 3, 34]
    assert tree.pages_cached == 6


@pytest.mark.parametrize("pages", [0, 1, 3])
def test_inserting_with_another_number_of_pages_is_refused(pages: int) -> None:
    tree, _ = tree_of()
    with pytest.raises(LengthMismatch, match=f"4 tokens are 2 pages, got {pages}"):
        tree.insert(tokens_of("ab"), np.arange(1, pages + 1))
    assert tree.pages_cached == 0


def test_the_tree_and_its_callers_do_not_share_index_memory() -> None:
    tree, _ = tree_of()
    given_in = np.array([1, 2, 3])
    tree.insert(tokens_of("abc"), given_in)
    given_in[:] = 99
    match = tree.match(tokens_of("abc"))
    match.pages[:] = 77
    assert found(tree, "abc") == [1, 2, 3]


def test_a_match_that_ends_inside_a_node_splits_it_and_both_halves_keep_the_lock() -> None:
    tree, allocator = tree_of()
    pages = cached(tree, allocator, "abcd")
    lower = tree.match(tokens_of("abcd")).node
    tree.lock(lower)
    upper = tree.match(tokens_of("ab")).node
    assert upper is not lower
    assert (upper.pages.tolist(), lower.pages.tolist()) == (pages[:2].tolist(), pages[2:].tolist())
    assert lower.parent is upper
    assert (upper.locks, lower.locks) == (1, 1)
    assert tree.evict(4) == 0
    tree.unlock(lower)
    assert (upper.locks, lower.locks, tree.root.locks) == (0, 0, 0)
    assert tree.evict(4) == 4


def test_locking_the_upper_half_leaves_the_lower_half_to_eviction() -> None:
    tree, allocator = tree_of()
    pages = cached(tree, allocator, "abcd")
    upper = tree.match(tokens_of("ab")).node
    tree.lock(upper)
    assert tree.pages_evictable() == 2
    assert tree.evict(4) == 2
    assert found(tree, "abcd") == pages[:2].tolist()


def test_unlocking_what_is_not_locked_is_refused() -> None:
    tree, allocator = tree_of()
    cached(tree, allocator, "ab")
    node = tree.match(tokens_of("ab")).node
    with pytest.raises(LengthMismatch, match="which is not locked"):
        tree.unlock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.pages_evictable() == 2


def test_eviction_goes_from_the_least_recently_used_leaf_to_the_next() -> None:
    tree, allocator = tree_of()
    for text in ("ab", "cd", "ef"):
        cached(tree, allocator, text)
    found(tree, "ab")  # now cd, ef, ab
    assert tree.evict(1) == 2  # a leaf goes whole
    assert [len(found(tree, text)) for text in ("cd", "ef", "ab")] == [0, 2, 2]
    assert tree.evict(3) == 4
    assert (tree.pages_cached, tree.evictions, allocator.live) == (0, 3, 0)


def test_of_leaves_used_at_the_same_time_the_older_node_goes_first() -> None:
    tree, allocator = tree_of()
    for text in ("ab", "cd"):
        cached(tree, allocator, text)
    nodes = [tree.match(tokens_of(text)).node for text in ("ab", "cd")]
    for node in nodes:
        node.last_used = 5
    tree.evict(1)
    assert [len(found(tree, text)) for text in ("ab", "cd")] == [0, 2]


def test_a_parent_is_evicted_only_after_its_children() -> None:
    tree, allocator = tree_of()
    cached(tree, allocator, "abc")
    cached(tree, allocator, "abd")
    tree.lock(tree.match(tokens_of("abd")).node)
    assert tree.evict(9) == 1  # c alone: a and b carry the locked d
    assert len(found(tree, "abd")) == 3
    assert allocator.live == 3


@pytest.mark.parametrize("pages", [0, -1])
def test_evicting_nothing_evicts_nothing(pages: int) -> None:
    tree, allocator = tree_of()
    cached(tree, allocator, "ab")
    assert tree.evict(pages) == 0
    assert tree.pages_cached == 2


def test_a_pinned_page_is_not_evicted_silently() -> None:
    tree, allocator = tree_of()
    allocator.pin(cached(tree, allocator, "ab")[:1])
    with pytest.raises(FreeInFlight):
        tree.evict(1)
    assert allocator.live == 2


@dataclass(slots=True)
class Prefix:
    """One cached prefix: the id of its last page, and when a call last went through it."""

    page: int
    used: int


@dataclass(slots=True)
class Model:
    """Every cached prefix, the clock, and the prefixes under lock."""

    rows: dict[Path, Prefix] = field(default_factory=dict)
    clock: int = 0
    locked: list[tuple[Path, Node]] = field(default_factory=list)

    def match(self, text: Path) -> list[int]:
        """Pages of the longest cached prefix, which is used now."""
        self.clock += 1
        pages = []
        for stop in range(1, len(text) + 1):
            if (row := self.rows.get(text[:stop])) is None:
                break
            row.used = self.clock
            pages.append(row.page)
        return pages

    def protected(self) -> set[Path]:
        """Locked prefixes and all prefixes of them."""
        return {path[:stop] for path, _ in self.locked for stop in range(1, len(path) + 1)}


class Freed:
    """Remembers which pages were freed."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
        """Not of interest."""

    def freed(self, space: str, ids: IndexArray) -> None:
        """These."""
        self.ids += ids.tolist()


def insert(tree: PrefixTree, model: Model, allocator: PageAllocator, text: str) -> None:
    """Insert in both, where there are pages enough."""
    pages = allocator.allocate(len(text), 1)
    if pages is None:
        return
    known = model.match(tuple(text))
    assert tree.insert(tokens_of(text + "."), pages) == len(known)
    allocator.free(pages[: len(known)])
    for at in range(len(known), len(text)):
        model.rows[tuple(text[: at + 1])] = Prefix(int(pages[at]), model.clock)


def evict(tree: PrefixTree, model: Model, freed: Freed, pages: int) -> None:
    """Evict, and judge by the model what has gone."""
    protected = model.protected()
    evictable = len(model.rows.keys() - protected)
    assert tree.pages_evictable() == evictable
    freed.ids.clear()
    count = tree.evict(pages)
    assert min(pages, evictable) <= count <= evictable
    by_page = {row.page: path for path, row in model.rows.items()}
    gone = [by_page[page] for page in freed.ids]
    assert len(set(gone)) == len(gone) == count
    assert not set(gone) & protected
    newest = max((model.rows[path].used for path in gone), default=0)
    for path in gone:
        del model.rows[path]
    assert all(path[:-1] in model.rows for path in model.rows if len(path) > 1)
    assert all(row.used >= newest for path, row in model.rows.items() if path not in protected)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]),
        st.text(alphabet="abc", max_size=5),
        st.integers(0, 6),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(CALLS)
def test_the_tree_caches_what_a_table_of_all_prefixes_caches(calls: list[tuple[str, str, int]]) -> None:
    freed, model = Freed(), Model()
    allocator = PageAllocator("full", count=POOL_PAGES, page_size=SIZE, listener=freed)
    tree = PrefixTree(SIZE, allocator)
    for verb, text, n in calls:
        if verb == "insert":
            insert(tree, model, allocator, text)
        elif verb in ("match", "lock"):
            match = tree.match(tokens_of(text))
            assert match.pages.tolist() == model.match(tuple(text))
            if verb == "lock":
                tree.lock(match.node)
                model.locked.append((tuple(text[: len(match.pages)]), match.node))
        elif verb == "unlock" and model.locked:
            tree.unlock(model.locked.pop(n % len(model.locked))[1])
        elif verb == "evict":
            evict(tree, model, freed, n)
        assert tree.pages_cached == len(model.rows) == allocator.live
    for path, node in model.locked:
        assert found(tree, "".join(path)) == [model.rows[path[:stop]].page for stop in range(1, len(path) + 1)]
        tree.unlock(node)
    assert tree.pages_evictable() == len(model.rows)
    assert tree.evict(POOL_PAGES) == len(model.rows)
    assert (allocator.live, tree.pages_cached) == (0, 0)
