"""Prefix tree over whole pages and two tiers: match, insert, split, lock, remove.

Invariants:
- Nodes with device pages form a tree from the root; so do nodes with host pages, above those that have none yet.
- A match never crosses a node that neither tier holds; such a node is removed.
- Splitting keeps locks and pending transfers on both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.base.paging import IndexArray, first_seen_page
from kvcheck.core.cache.hicache.node import Node, PageMask, TierIndices, WindowPages, owned
from kvcheck.core.cache.hicache.storage import chain_hashes

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    node: Node
    nodes: tuple[Node, ...]  # the path without the root; it ends exactly at `pages`
    pages: int
    device_pages: int  # leading pages on the device; the rest is on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Pages [n] of a request for the tree, with its window pages and state slot."""

    full: IndexArray
    window: WindowPages | None = None
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The part of an offer that the tree took: bool [n] of pages and of window pages."""

    node: Node
    full: PageMask
    window: PageMask
    state: bool
    grown: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrefix:
    node: Node  # the deepest
    pages: int
    servable: int  # of `pages`
    held: dict[str, list[bool]]  # by space, for each page; a state only at the end of a node


class PrefixTree:
    """window: tokens a window layer sees, 0 without; has_state: prefixes end at a state. on_lock: gets node, tier and
    whether the lock was added. on_split: gets each node after its split."""

    def __init__(self, page_size: int, *, window: int = 0, has_state: bool = False) -> None:
        self.page_size = page_size
        self._window = window
        self._has_state = has_state
        self._created = 0
        self._clock = 0
        self.on_lock: Callable[[Node, str, bool], None] = lambda node, tier, added: None
        self.on_split: Callable[[Node], None] = lambda node: None
        self.root = self._node((), (), None)
        self.root.device.full = owned(np.zeros(0, dtype=np.int64))
        self.root.host.full = owned(np.zeros(0, dtype=np.int64))

    def keys(self, tokens: Tokens) -> list[bytes]:
        size = self.page_size
        return [tokens[i * size : (i + 1) * size].tobytes() for i in range(len(tokens) // size)]

    def chain(self, tokens: Tokens) -> tuple[bytes, ...]:
        return chain_hashes(self.keys(tokens))

    def match(self, tokens: Tokens, *, priority: int = 0, device_only: bool = False) -> Match:
        """Return the longest servable prefix in whole pages; split a node if it ends inside one."""
        self._clock += 1
        path = self._walk(self.keys(tokens))
        pages = self._servable(path, device_only=device_only)
        nodes: list[Node] = []
        device = at = 0
        for node in path:
            if at >= pages:
                break
            if at + len(node.keys) > pages:
                node = self._split(node, pages - at)
            at += len(node.keys)
            device = at if node.device.is_live else device
            node.last_used = self._clock
            node.hits += 1
            node.priority = max(node.priority, priority)
            nodes.append(node)
        return Match(
            node=nodes[-1] if nodes else self.root, nodes=tuple(nodes), pages=pages, device_pages=min(device, pages)
        )

    def known(self, tokens: Tokens) -> KnownPrefix:
        """Look up both tiers without counting a use."""
        path: list[Node] = []
        for node in self._walk(self.keys(tokens)):
            if not (node.device.is_live or node.is_backed):
                break
            path.append(node)
        held: dict[str, list[bool]] = {"full": [], "window": [], "state": []}
        for node in path:
            held["full"] += [True] * len(node.keys)
            held["window"] += _window_held(node, False)
            held["state"] += [False] * (len(node.keys) - 1) + [_has_state(node, False)]
        return KnownPrefix(
            node=path[-1] if path else self.root,
            pages=len(held["full"]),
            servable=self._servable(path, device_only=False),
            held=held,
        )

    def device_match(self, tokens: Tokens) -> tuple[Node, int]:
        """The deepest node of the path with device pages, and their number."""
        node, pages = self.root, 0
        for each in self._walk(self.keys(tokens)):
            if not each.device.is_live:
                break
            node, pages = each, pages + len(each.keys)
        return node, pages

    def insert(self, tokens: Tokens, offer: Offer, *, priority: int = 0) -> Taken:
        keys = self.keys(tokens)
        if len(offer.full) != len(keys):
            raise LengthMismatch(f"insert: {len(tokens)} tokens are {len(keys)} pages, got {len(offer.full)}")
        self._clock += 1
        full, window = np.zeros(len(keys), dtype=bool), np.zeros(len(keys), dtype=bool)
        grown: list[Node] = []
        node, at = self.root, 0
        for each in self._walk(keys):
            stop = at + len(each.keys)
            if not each.device.is_live:
                # The pages were computed again: the node is on the device once more.
                self._fill(each, offer, at, stop, full, window)
                grown.append(each)
            each.last_used, node, at = self._clock, each, stop
        if at < len(keys):
            before = node.chain[-1] if node.chain else b""
            leaf = self._node(tuple(keys[at:]), chain_hashes(keys[at:], before), node)
            leaf.last_used, leaf.priority = self._clock, priority
            self._fill(leaf, offer, at, len(keys), full, window)
            node.children[keys[at]] = leaf
            grown.append(leaf)
            node = leaf
        state = offer.state is not None and node is not self.root and node.device.state is None
        if state:
            node.device.state = offer.state
        return Taken(node=node, full=full, window=window, state=state, grown=tuple(grown))

    def insert_host(self, tokens: Tokens, start: int, host: TierIndices) -> Node | None:
        """Cache pages [start, ...) on the host; None if the path before or after has changed."""
        keys = self.keys(tokens)
        path = self._path_now(keys, start)
        known = sum(len(node.keys) for node in path)
        parent = path[-1] if path else self.root
        if known != start or host.full is None or not (parent.host.is_live or parent is self.root):
            return None
        self._clock += 1
        stop = start + len(host.full)
        before = parent.chain[-1] if parent.chain else b""
        leaf = self._node(tuple(keys[start:stop]), chain_hashes(keys[start:stop], before), parent)
        leaf.host = host
        leaf.last_used = self._clock
        parent.children[keys[start]] = leaf
        return leaf

    def _path_now(self, keys: list[bytes], start: int) -> list[Node]:
        """Current path of a prompt that had `start` pages before. (mutant: fetch-replaces-computed)"""
        return self._walk(keys)

    def lock(self, node: Node) -> None:
        for each in node.path():
            each.locks += 1
        self.on_lock(node, "device", True)

    def unlock(self, node: Node) -> None:
        for each in node.path():
            if each.locks < 1:
                raise LengthMismatch(f"unlock of node {each.ordinal}, which is not locked")
            each.locks -= 1
        self.on_lock(node, "device", False)

    def lock_host(self, node: Node) -> None:
        for each in node.path():
            each.host_locks += 1
        self.on_lock(node, "host", True)

    def unlock_host(self, node: Node) -> None:
        for each in node.path():
            if each.host_locks < 1:
                raise LengthMismatch(f"unlock of the host pages of node {each.ordinal}, which are not locked")
            each.host_locks -= 1
        self.on_lock(node, "host", False)

    def remove(self, node: Node) -> None:
        if node.children or node.parent is None:
            raise LengthMismatch(f"remove of node {node.ordinal}, which has {len(node.children)} children")
        del node.parent.children[node.keys[0]]

    def nodes(self, *, on_device: bool = False) -> Iterator[Node]:
        """Every node but the root, parents first. on_device: only those with device pages."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            if not on_device or node.device.is_live:
                yield node
                waiting.extend(node.children.values())

    # Lookups

    def _walk(self, keys: list[bytes]) -> list[Node]:
        """Nodes that spell a prefix of `keys`, the last one split at its end."""
        node, at = self.root, 0
        path: list[Node] = []
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            same = _common(child.keys, keys[at:])
            if same < len(child.keys):
                child = self._split(child, same)
            path.append(child)
            at += same
            node = child
        return path

    def _servable(self, path: list[Node], *, device_only: bool) -> int:
        """Pages of the longest prefix that is complete in every space on one tier or the other."""
        best = at = 0
        unbroken = 0  # from this page on, every window page so far is held
        for node in path:
            if not (node.device.is_live or (node.is_backed and not device_only)):
                break
            stop = at + len(node.keys)
            if self._has_state:
                if _has_state(node, device_only):
                    best = stop
            elif not self._window:
                best = stop
            else:
                for page, held in enumerate(_window_held(node, device_only), at):
                    unbroken = unbroken if held else page + 1
                    # The next position is (page + 1) * size; it sees `window` tokens, itself included.
                    if unbroken <= first_seen_page((page + 1) * self.page_size, self._window, self.page_size):
                        best = page + 1
            at = stop
        return best

    # Structure

    def _fill(
        self,
        node: Node,
        offer: Offer,
        start: int,
        stop: int,
        full: PageMask,
        window: PageMask,
    ) -> None:
        node.device.full = owned(offer.full[start:stop])
        full[start:stop] = True
        if offer.window is not None:
            node.device.window = offer.window.part(start, stop)
            window[start:stop] = node.device.window.held

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages; return the upper half. The state stays below. (mutant: split-forgets-load)"""
        assert node.parent is not None
        upper = self._node(node.keys[:at], node.chain[:at], node.parent)
        for name in ("locks", "host_locks", "hits", "priority", "last_used", "loading", "backing", "stored"):
            setattr(upper, name, getattr(node, name))
        for mine, theirs in ((upper.device, node.device), (upper.host, node.host)):
            if theirs.full is not None:
                mine.full, theirs.full = owned(theirs.full[:at]), owned(theirs.full[at:])
            if theirs.window is not None:
                window = theirs.window
                mine.window, theirs.window = window.part(0, at), window.part(at, len(window.held))
        for transfer in (*node.loading, *((node.backing,) if node.backing is not None else ())):
            transfer.nodes.append(upper)
        node.parent.children[node.keys[0]] = upper
        node.keys, node.chain, node.parent = node.keys[at:], node.chain[at:], upper
        upper.children[node.keys[0]] = node
        self.on_split(node)
        return upper

    def _node(self, keys: tuple[bytes, ...], chain: tuple[bytes, ...], parent: Node | None) -> Node:
        self._created += 1
        return Node(keys, chain, parent, self._created)


def _has_state(node: Node, device_only: bool) -> bool:
    if node.device.is_live and node.device.state is not None:
        return True
    return not device_only and node.is_backed and node.host.state is not None


def _window_held(node: Node, device_only: bool) -> list[bool]:
    held = np.zeros(len(node.keys), dtype=bool)
    if node.device.is_live and node.device.window is not None:
        held |= node.device.window.held
    if not device_only and node.is_backed and node.host.window is not None:
        held |= node.host.window.held
    return [bool(each) for each in held]


def _common(left: tuple[bytes, ...], right: list[bytes]) -> int:
    same = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        same += 1
    return same
