"""Prefix trees: SGLang's own, made by their constructors, and those over a host tier with their lists.

The device under a tree with a host tier is a stand-in (`frame/device.py`). Host pools' copies are replaced, so that the
probe gets their lists. Pools hand out their slots in a shuffled order, so that a sorted list differs from the original.
"""

from __future__ import annotations

import atexit
import inspect
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.device import DEVICE, HOST
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.rig.pools import make_pools, sizes

TOKENS, STATES = 160, 12
"""Slots on the device, enough for short prefixes. The host has twice as many."""
PAGES, STATE = "pages", "states"
"""Kinds of lists: the slots of a node's tokens, and the slot of its recurrent state."""
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
COPIES = {
    "backup_from_device_all_layer": True,
    "backup_from_device_all_layer_physical": True,
    "load_to_device_per_layer": False,
    "load_to_device_per_layer_physical": False,
}
"""Methods of a host pool that copy, and whether they copy to the host."""


@dataclass(frozen=True, slots=True)
class TreeKind:
    """A tree over a host tier. name: of its capability. also: further capabilities that it needs.

    device: of its device lists. A compiled core takes no stand-in tensors, so its lists lie in host memory.
    """

    name: str
    also: tuple[str, ...] = ()
    device: str = DEVICE


UNIFIED = "hicache.unified-tree"
_UNIFIED_NEEDS = ("hicache.unified-start", "tree.components")
_UNIFIED_KINDS = (TreeKind(UNIFIED, _UNIFIED_NEEDS), TreeKind(UNIFIED, (*_UNIFIED_NEEDS, "tree.compiled-core"), HOST))
COMPONENTS = {"swa": ("FULL", "SWA"), "mamba": ("FULL", "MAMBA")}
"""Components of a unified tree, by pool family where it has more than full attention."""
FAMILIES = {"tree": "mha", "mamba-tree": "mamba"}
"""The pool family under a tree over a host tier."""
KINDS = {
    "tree": (TreeKind("hicache.tree"), *_UNIFIED_KINDS),
    "mamba-tree": (TreeKind("hicache.mamba-tree"), *_UNIFIED_KINDS),
}
"""Trees for a kind of model, in the order in which they are tried."""
NEEDS = ("tree.params", "tree.key", "tree.insert", "tree.match", "tree.evict", "server.args", "server.publish")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedIndices:
    """A list of a tree's node. tokens: of the node."""

    kind: str
    tier: str
    value: torch.Tensor
    tokens: tuple[int, ...]

    @property
    def wanted(self) -> tuple[int, ...]:
        """The tokens that its slots must hold; for a state, the last token of its prefix."""
        return self.tokens if self.kind == PAGES else self.tokens[-1:]


Given = Callable[[str, bool, torch.Tensor, torch.Tensor], None]
"""Called with the arguments of a host pool's copy: kind, whether to the host, host ids, device ids."""


@dataclass(slots=True, kw_only=True)
class Tree:
    """A tree with its pools. states: the allocator of states, or None. known: prefixes that were inserted."""

    rig: Rig
    device: str
    cache: Any
    name: str
    allocator: Any
    states: Any
    hosts: dict[str, Any]
    known: list[tuple[int, ...]] = field(default_factory=list)

    def insert(self, tokens: Sequence[int], pages: torch.Tensor, state: torch.Tensor | None) -> None:
        offered = {"key": self._key(tokens), "value": pages, "mamba_value": state}
        params = fitted(self.rig.names["tree.insert"], offered)
        self.known.append(tuple(tokens))
        self.rig.measured(lambda: self.cache.insert(params), f"{self.name}: insert")

    def evict(self, tokens: int, states: int) -> None:
        params = fitted(self.rig.names["tree.evict"], {"num_tokens": tokens, "mamba_num": states})
        self.rig.measured(lambda: self.cache.evict(params), f"{self.name}: evict")

    def evict_host(self, tokens: int) -> None:
        self.rig.measured(lambda: self.cache.evict_host(tokens), f"{self.name}: evict_host")

    def evict_host_states(self, count: int) -> None:
        if hasattr(self.cache, "evict_mamba_host"):
            self.rig.measured(lambda: self.cache.evict_mamba_host(count), f"{self.name}: evict_mamba_host")

    def ask_load(self, tokens: Sequence[int]) -> None:
        names, call = self.rig.names, self.cache.init_load_back
        found = self._match(tokens)
        if names.has("tree.load"):
            offered = {
                "last_host_node": found.last_host_node,
                "best_match_node": getattr(found, "best_match_node", None),
                "host_hit_length": found.host_hit_length,
                "req": _request(found),
            }
            wanted = fitted(names["tree.load"], offered)
            self.rig.measured(lambda: call(wanted), f"{self.name}: init_load_back")
        else:
            self.rig.measured(lambda: call(found.last_host_node, found.host_hit_length), f"{self.name}: init_load_back")

    def start_loads(self) -> None:
        self.rig.measured(self.cache.ready_to_load_host_cache, f"{self.name}: ready_to_load_host_cache")

    def settle(self) -> None:
        self.rig.measured(self.cache.check_hicache_events, f"{self.name}: check_hicache_events", is_aside=True)

    def lists(self) -> Iterator[ListedIndices]:
        """A compiled core shows no nodes: of it, the device lists of each known prefix."""
        core, names = getattr(self.cache, "tree_core", self.cache), self.rig.names
        if names.has("tree.compiled-core") and isinstance(core, names["tree.compiled-core"]):
            yield from self._by_prefix(core)
            return
        waiting = list(core.root_node.children.values())
        while waiting:
            node = waiting.pop(0)
            tokens = tuple(int(token) for token in node.key)
            for kind, tier, value in self._of(node):
                if value is not None:
                    yield ListedIndices(kind=kind, tier=tier, value=value, tokens=tokens)
            waiting += node.children.values()

    def _by_prefix(self, core: Any) -> Iterator[ListedIndices]:
        for tokens in self.known:
            found = self._match(tokens)
            last = found.last_device_node
            if self.rig.names.has("tree.path-slots"):
                slots, length = self.cache.path_device_indices(last), found.device_prefix_len
            else:
                slots, length = found.device_indices, len(found.device_indices)
            there = tokens[:length]
            if there:
                yield ListedIndices(kind=PAGES, tier="device", value=slots, tokens=there)
                part = self.rig.names["tree.components"].MAMBA
                state = core.get_component_device_value(last, part) if self.states is not None else None
                if state is not None:
                    yield ListedIndices(kind=STATE, tier="device", value=state, tokens=there)

    def _match(self, tokens: Sequence[int]) -> Any:
        params = fitted(self.rig.names["tree.match"], {"key": self._key(tokens)})
        return self.rig.measured(lambda: self.cache.match_prefix(params), f"{self.name}: match_prefix", is_aside=True)

    def _of(self, node: Any) -> Iterator[tuple[str, str, torch.Tensor | None]]:
        if hasattr(node, "component_data"):
            parts = self.rig.names["tree.components"]
            for kind, part in ((PAGES, parts.FULL), (STATE, parts.MAMBA)):
                yield kind, "device", node.component_data[part].value
                yield kind, "host", node.component_data[part].host_value
            return
        yield PAGES, "device", node.value
        yield PAGES, "host", node.host_value
        yield STATE, "device", getattr(node, "mamba_value", None)
        yield STATE, "host", getattr(node, "mamba_host_value", None)

    def _key(self, tokens: Sequence[int]) -> Any:
        return self.rig.names["tree.key"](array("q", tokens))


def found_kinds(rig: Rig, model: str) -> list[TreeKind]:
    """Raises CannotDrive with every missing name if there are none."""
    names, missing = rig.names, []
    kinds = []
    for kind in KINDS[model]:
        lacks = [name for name in (kind.name, *kind.also) if not names.has(name)]
        if lacks:
            missing.append(f"{lacks[0]} ({names.find(lacks[0]).why_not})")
        else:
            kinds.append(kind)
    if not kinds:
        raise CannotDrive(f"this release has no {'; no '.join(missing)}")
    return kinds


def make_tree(
    rig: Rig,
    name: str,
    family: str,
    *,
    request_pool: Any,
    allocator: Any,
    page_size: int,
    host_tier: Any = None,
    **more: Any,
) -> Any:
    """name: its capability. more: parameters that not all trees have. host_tier: server arguments, if it has one."""
    names = rig.names
    offered = {
        "disable": False,
        "req_to_token_pool": request_pool,
        "token_to_kv_pool_allocator": allocator,
        "page_size": page_size,
        "tp_cache_group": ALONE,
        **more,
    }
    if name == UNIFIED:
        parts = names["tree.components"]
        offered["tree_components"] = tuple(getattr(parts, each) for each in COMPONENTS.get(family, ("FULL",)))
    params = fitted(names["tree.params"], offered)
    if host_tier is None:
        tree = names[name](params)
    elif name == UNIFIED:
        tree = names[name](params)
        tree.init_hicache(host_tier, params)
    else:
        tree = names[name](params, host_tier)
    if hasattr(tree, "shutdown"):
        atexit.unregister(tree.shutdown)  # the exit hook would keep it alive
    return tree


def build(rig: Rig, kind: TreeKind, model: str, arguments: Any, given: Given, tokens: int = TOKENS) -> Tree:
    """Raises the engine's ValueError if it refuses the io_backend and the layout of the arguments."""
    family = FAMILIES[model]
    _, allocator, rows = make_pools(rig, family, sizes(1, tokens, tokens, STATES), kind.device)
    cache = make_tree(rig, kind.name, family, request_pool=rows, allocator=allocator, page_size=1, host_tier=arguments)
    name = type(cache).__name__
    if hasattr(cache, "tree_core"):
        name = f"{name} over {type(cache.tree_core).__name__}"
        rig.judge.note(f"driven: {name}")
    states = getattr(rows, "mamba_allocator", None) or getattr(rows, "mamba_pool", None)
    tree = Tree(
        rig=rig, device=kind.device, cache=cache, name=name, allocator=allocator, states=states, hosts=_hosts(cache)
    )
    for lists, host in tree.hosts.items():
        _stand_in(host, lists, given)
    for pool in (allocator, states, *tree.hosts.values()):
        if pool is not None:
            _shuffle(rig, pool)
    return tree


def _hosts(cache: Any) -> dict[str, Any]:
    host = cache.cache_controller.mem_pool_host
    entries = list(getattr(host, "entries", ()))
    if not entries:
        return {PAGES: host}
    if len(entries) > 2:
        raise CannotDrive(f"the tree has host pools {', '.join(str(each.name) for each in entries)}; two are known")
    return dict(zip((PAGES, STATE), (each.host_pool for each in entries), strict=False))


def _stand_in(host: Any, kind: str, given: Given) -> None:
    for name, is_backup in COPIES.items():
        if hasattr(host, name):
            setattr(host, name, _copying(inspect.signature(getattr(host, name)), kind, is_backup, given))


def _copying(signature: inspect.Signature, kind: str, is_backup: bool, given: Given) -> Callable[..., None]:
    def copy(*args: Any, **named: Any) -> None:
        told = signature.bind(*args, **named).arguments
        given(kind, is_backup, told["host_indices"], told["device_indices"])

    return copy


def _shuffle(rig: Rig, pool: Any) -> None:
    taken = pool.alloc(pool.available_size())
    order = list(range(len(taken)))
    mixed = [order.pop(rig.mix.below(len(order))) for _ in range(len(taken))]
    pool.free(taken[torch.tensor(mixed, dtype=torch.int64, device=HOST)])


def _request(found: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rid="0",
        mamba_pool_idx=None,
        last_node=found.last_device_node,
        swa_host_hit_length=0,
        mamba_host_hit_length=getattr(found, "mamba_host_hit_length", 0),
        kv=SimpleNamespace(mamba_pool_idx=None, holds_mamba=False),
    )
