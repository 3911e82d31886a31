"""Tree accounts: every page, window page and state is free, in the tree, or held by a request, exactly once.

Invariants:
- The tree is walked from its root. The sizes and locks that it reports are compared with the walk.
- Requests are identified by the rows that they hold, not by the tree's locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pools import SmallPool


@dataclass(frozen=True, slots=True)
class AccountedNode:
    """A node of the tree. tokens: its slots. has_window: it holds their window slots too. state: its state slots."""

    length: int
    tokens: tuple[int, ...]
    locks: int
    has_window: bool
    window_locks: int
    state: tuple[int, ...]
    state_locks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Contents of a tree. nodes: None if its nodes cannot be read. free_*: without a lock."""

    nodes: tuple[AccountedNode, ...] | None
    tokens: tuple[int, ...]
    free_tokens: frozenset[int]
    windows: tuple[int, ...]
    free_windows: frozenset[int]
    states: tuple[int, ...]
    free_states: int | None


def view_of(tree: Any, kinds: Any) -> View:
    """Return all nodes except the root. kinds: the engine's component types, None if the tree has no components."""
    core = getattr(tree, "tree_core", None)
    if core is not None and _is_compiled(core):
        return _view_of_compiled(core, kinds)
    nodes = tuple(_nodes(tree.root_node, kinds))
    return View(
        nodes=nodes,
        tokens=tuple(each for node in nodes for each in node.tokens),
        free_tokens=frozenset(each for node in nodes if not node.locks for each in node.tokens),
        windows=tuple(each for node in nodes if node.has_window for each in node.tokens),
        free_windows=frozenset(
            each for node in nodes if node.has_window and not node.window_locks for each in node.tokens
        ),
        states=tuple(each for node in nodes for each in node.state),
        free_states=sum(len(node.state) for node in nodes if not node.state_locks),
    )


def _is_compiled(core: Any) -> bool:
    return hasattr(core, "walk_for_kv_canary") and not hasattr(core, "components_by_type")


def _view_of_compiled(core: Any, kinds: Any) -> View:
    def walk(*flags: bool) -> tuple[int, ...]:
        return _ids(core.walk_for_kv_canary(*flags).slot_indices)

    parts = {int(each) for each in core.tree_components}
    has_windows, has_states = int(kinds.SWA) in parts, int(kinds.MAMBA) in parts
    return View(
        nodes=None,
        tokens=walk(False, False),
        free_tokens=frozenset(walk(True, False)),
        windows=walk(False, True) if has_windows else (),
        free_windows=frozenset(walk(True, True)) if has_windows else frozenset(),
        states=_ids(core.all_mamba_values_flatten()) if has_states else (),
        free_states=None,
    )


def _nodes(root: Any, kinds: Any) -> Iterator[AccountedNode]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield _node(node) if kinds is None else _node_of_components(node, kinds)


def _node(node: Any) -> AccountedNode:
    return AccountedNode(
        length=len(node.key),
        tokens=_ids(node.value),
        locks=int(getattr(node, "full_lock_ref", getattr(node, "lock_ref", 0))),
        has_window=not getattr(node, "swa_tombstone", True),
        window_locks=int(getattr(node, "swa_lock_ref", 0)),
        state=_ids(getattr(node, "mamba_value", None)),
        state_locks=int(getattr(node, "mamba_lock_ref", 0)),
    )


def _node_of_components(node: Any, kinds: Any) -> AccountedNode:
    full, window, state = (node.component_data[kind] for kind in (kinds.FULL, kinds.SWA, kinds.MAMBA))
    return AccountedNode(
        length=len(node.key),
        tokens=_ids(full.value),
        locks=int(full.lock_ref),
        has_window=window.value is not None,
        window_locks=int(window.lock_ref),
        state=_ids(state.value),
        state_locks=int(state.lock_ref),
    )


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(torch.as_tensor(value).view(-1).tolist())


def free_pages(allocator: Any) -> list[int]:
    pages: Callable[[], torch.Tensor] | None = getattr(allocator, "get_all_free_pages", None)
    free = pages() if pages is not None else torch.cat((allocator.free_pages, allocator.release_pages))
    ids: list[int] = free.tolist()
    if len(ids) * allocator.page_size != allocator.available_size():
        raise CannotDrive(f"an allocator with {len(ids)} free pages says it has {allocator.available_size()} tokens")
    return ids


@dataclass(frozen=True, slots=True)
class Account:
    what: str
    units: list[int]
    free: list[int]
    in_tree: list[int]
    held: list[tuple[str, set[int]]]


class TreeAccounts:
    """Accounts of one tree over one pool, made while the pool is fresh. kinds: see `view_of`."""

    def __init__(self, rig: Rig, made: SmallPool, tree: Any, kinds: Any) -> None:
        self._rig, self._made, self._tree, self._kinds = rig, made, tree, kinds
        allocator, size = made.allocator, made.page_size
        self._units = {"page": self.free()}
        counts = {"page": int(getattr(allocator, "size_full", allocator.size)) // size}
        self._unmapped: set[int] = set()
        if made.family == "swa":
            self._unmapped = set(allocator.full_to_swa_index_mapping.tolist())
            self._units["window page"] = free_pages(allocator.swa_attn_allocator)
            counts["window page"] = int(allocator.size_swa) // size
        if made.family == "mamba":
            self._units["state"] = self._states_free()
            counts["state"] = int(self._state_slots.size)
        for what, units in self._units.items():
            if len(set(units)) != len(units) or len(units) != counts[what]:
                raise CannotDrive(f"of {counts[what]} {what}s these are free before the first request: {units}")
        if mapped := {each // size for each in self._unmapped} & set(self._units.get("window page", ())):
            raise CannotDrive(f"slots of window pages {sorted(mapped)} are mapped before the first request")

    def free(self) -> list[int]:
        return free_pages(getattr(self._made.allocator, "full_attn_allocator", self._made.allocator))

    def check(self, rows: dict[str, tuple[int, ...]], states: dict[str, int], when: str) -> None:
        """rows: request -> slots that it holds. states: request -> its state slot."""
        view = view_of(self._tree, self._kinds)
        self._rig.judge.count("orderings_checked")
        self._settle(self._pages(view, rows), when)
        if self._made.family == "swa":
            self._settle(self._windows(view, rows), when)
        if self._made.family == "mamba":
            self._settle(self._states(view, states), when)
        self._locks(view, rows, when)
        self._sizes(view, when)

    def _pages(self, view: View, rows: dict[str, tuple[int, ...]]) -> Account:
        size = self._made.page_size
        in_tree = [token // size for token in view.tokens if token % size == 0]
        shared = {token // size for token in view.tokens}
        held = [(name, {each // size for each in row} - shared) for name, row in rows.items()]
        return Account("page", self._units["page"], self.free(), in_tree, held)

    def _windows(self, view: View, rows: dict[str, tuple[int, ...]]) -> Account:
        size, allocator = self._made.page_size, self._made.allocator
        mapping = allocator.full_to_swa_index_mapping.tolist()
        in_tree = [mapping[each] // size for each in view.windows if each % size == 0]
        shared = set(view.tokens)
        held = [
            (
                name,
                {mapping[each] // size for each in row if each not in shared and mapping[each] not in self._unmapped},
            )
            for name, row in rows.items()
        ]
        return Account(
            "window page", self._units["window page"], free_pages(allocator.swa_attn_allocator), in_tree, held
        )

    def _states(self, view: View, states: dict[str, int]) -> Account:
        held = [(name, {slot}) for name, slot in states.items()]
        return Account("state", self._units["state"], self._states_free(), list(view.states), held)

    @property
    def _state_slots(self) -> Any:
        pool = self._made.request_pool
        return getattr(pool, "mamba_allocator", pool.mamba_pool)

    def _states_free(self) -> list[int]:
        free: list[int] = self._state_slots.free_slots.tolist()
        return free

    def _settle(self, account: Account, when: str) -> None:
        find, what, known = self._rig.judge.find, account.what, set(account.units)
        owners: dict[int, list[str]] = {}
        for owner, units in (("free", account.free), ("the tree", account.in_tree), *account.held):
            for unit in units:
                owners.setdefault(unit, []).append(owner if owner in ("free", "the tree") else f"request {owner}")
        for unit, names in sorted(owners.items()):
            if unit not in known:
                text = f"{when}: {what} {unit} is {_of(names)}; there are {min(known)} .. {max(known)}"
                find("KV402", "accounting", text, page=unit, lane=what)
            elif len(names) > 1:
                code = "KV402" if "free" in names else "KV403"
                find(code, "accounting", f"{when}: {what} {unit} is {_of(names)}", page=unit, lane=what)
        lost = sorted(known - set(owners))
        if lost:
            text = f"{when}: {what}s {lost} are neither free, nor in the tree, nor a live request's"
            find("KV401", "accounting", text, page=lost[0], lane=what)

    def _locks(self, view: View, rows: dict[str, tuple[int, ...]], when: str) -> None:
        find = self._rig.judge.find
        users = Counter(each for row in rows.values() for each in set(row))
        for token in view.tokens:
            if (token in view.free_tokens) == bool(users[token]):
                code, text = ("KV402", "nobody has locked it") if users[token] else ("KV401", "it is locked")
                text = f"{users[token]} requests use token {token} of the tree, and {text}"
                find(code, "accounting", f"{when}: {text}", row=token, lane="locks")
        for node in view.nodes or ():
            count = users[node.tokens[0]] if node.tokens else 0
            if node.locks != count:
                text = f"a node of tokens {list(node.tokens[:4])} counts {node.locks} locks, {count} requests use it"
                find("KV401" if node.locks > count else "KV402", "accounting", f"{when}: {text}", lane="locks")
            if len(node.tokens) != node.length:
                text = f"a node with a key of {node.length} tokens has {len(node.tokens)} values"
                find("KV301", "accounting", f"{when}: {text}", lane="nodes")

    def _sizes(self, view: View, when: str) -> None:
        tree, family = self._tree, self._made.family
        prefix = "full_" if family in ("swa", "mamba") else ""
        walked = {
            f"{prefix}evictable_size": len(view.free_tokens),
            f"{prefix}protected_size": len(view.tokens) - len(view.free_tokens),
        }
        if family == "swa":
            walked["swa_evictable_size"] = len(view.free_windows)
            walked["swa_protected_size"] = len(view.windows) - len(view.free_windows)
        if family == "mamba" and view.free_states is not None:
            walked["mamba_evictable_size"] = view.free_states
            walked["mamba_protected_size"] = len(view.states) - view.free_states
        for name, count in walked.items():
            if (says := int(getattr(tree, name)())) != count:
                text = f"{when}: {name} is {says}; walking the tree gives {count}"
                self._rig.judge.find("KV401", "accounting", text, lane=name)


def _of(names: list[str]) -> str:
    counts = Counter(names)
    return " and ".join(f"{name} {count} times" if count > 1 else name for name, count in counts.items())
