"""Prefix tree over whole pages: match, insert, split, lock, evict, on the device tier.

    root --[page, page]--> node --[page]--> node        an edge holds whole pages of tokens and their page ids

Invariants:
- A node's pages belong to the tree; its index values are owned copies that are never changed, only replaced.
- A locked node, and every ancestor of it, is not evicted.
- Eviction takes unlocked leaves, least recently used first; ties go to the older node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.errors import LengthMismatch
from kvcheck.core.paging import IndexArray
from kvcheck.core.pools.allocator import IdAllocator

Tokens = npt.NDArray[np.int64]


class Node:
    """A run of pages after its parent's. keys: one bytes value a page, the page's tokens. pages: their ids."""

    __slots__ = ("children", "keys", "last_used", "locks", "ordinal", "pages", "parent")

    def __init__(self, keys: tuple[bytes, ...], pages: IndexArray, parent: Node | None, ordinal: int) -> None:
        self.keys = keys
        self.pages = pages
        self.parent = parent
        self.ordinal = ordinal
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Pages of the longest cached prefix, and the node that ends it."""

    pages: IndexArray
    node: Node


class PrefixTree:
    """Cached prefixes of finished and prefilled requests."""

    def __init__(self, page_size: int, allocator: IdAllocator) -> None:
        self.page_size = page_size
        self._allocator = allocator
        self._created = 0
        self._clock = 0
        self.root = self._node((), np.zeros(0, dtype=np.int64), None)
        self.pages_cached = 0
        self.evictions = 0

    def match(self, tokens: Tokens) -> Match:
        """The longest prefix in whole pages; splits a node where the match ends inside it."""
        self._clock += 1
        node, found = self.root, [self.root.pages]
        keys = self._keys(tokens)
        at = 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            same = _common(child.keys, keys[at:])
            if same < len(child.keys):
                child = self._split(child, same)
            child.last_used = self._clock
            found.append(child.pages)
            at += same
            node = child
        return Match(np.concatenate(found), node)

    def insert(self, tokens: Tokens, pages: IndexArray) -> int:
        """Cache whole pages of a sequence. pages: [len(tokens) // page_size].

        Returns how many leading pages were cached already; the tree takes the pages after those, and the caller
        keeps (and frees) its own copies of the leading ones where they differ.
        """
        if len(pages) != len(tokens) // self.page_size:
            raise LengthMismatch(
                f"insert: {len(tokens)} tokens are {len(tokens) // self.page_size} pages, got {len(pages)}"
            )
        match = self.match(tokens)
        known = len(match.pages)
        keys = self._keys(tokens)
        if known < len(keys):
            leaf = self._node(tuple(keys[known:]), pages[known:].copy(), match.node)
            leaf.last_used = self._clock
            match.node.children[keys[known]] = leaf
            self.pages_cached += len(leaf.pages)
        return known

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors from eviction."""
        for each in self._path(node):
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        for each in self._path(node):
            if each.locks < 1:
                raise LengthMismatch(f"unlock of node {each.ordinal}, which is not locked")
            each.locks -= 1

    def evict(self, pages: int) -> int:
        """Free at least `pages` pages if unlocked leaves allow it. Returns how many were freed."""
        freed = 0
        while freed < pages:
            leaves = [
                node for node in self._nodes() if not node.children and not node.locks and node.parent is not None
            ]
            if not leaves:
                break
            victim = min(leaves, key=lambda node: (node.last_used, node.ordinal))
            assert victim.parent is not None
            self._allocator.free(victim.pages)  # first: it refuses pages in use, and then nothing has changed
            del victim.parent.children[victim.keys[0]]
            self.pages_cached -= len(victim.pages)
            freed += len(victim.pages)
            self.evictions += 1
        return freed

    def pages_evictable(self) -> int:
        """Cached pages that no lock protects."""
        return sum(len(node.pages) for node in self._nodes() if not node.locks)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages; returns the new upper half. Locks hold for both halves."""
        assert node.parent is not None
        upper = self._node(node.keys[:at], node.pages[:at].copy(), node.parent)
        upper.locks = node.locks
        upper.last_used = node.last_used
        node.parent.children[node.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:].copy(), upper
        upper.children[node.keys[0]] = node
        return upper

    def _node(self, keys: tuple[bytes, ...], pages: IndexArray, parent: Node | None) -> Node:
        self._created += 1
        return Node(keys, pages, parent, self._created)

    def _keys(self, tokens: Tokens) -> list[bytes]:
        size = self.page_size
        return [tokens[i * size : (i + 1) * size].tobytes() for i in range(len(tokens) // size)]

    def _nodes(self) -> Iterator[Node]:
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _path(self, node: Node) -> Iterator[Node]:
        at: Node | None = node
        while at is not None:
            yield at
            at = at.parent


def _common(left: tuple[bytes, ...], right: list[bytes]) -> int:
    """How many leading pages are equal."""
    same = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        same += 1
    return same
