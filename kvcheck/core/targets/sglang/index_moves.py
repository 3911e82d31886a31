"""Probe index-moves: lists of page ids that are moved for a copy, while the prefix tree keeps the same lists.

Tensors without memory stand for tensors on the device, so that a list that lies on the wrong side shows; where both
sides lie in memory, every value is compared. Copies themselves are not made.

Invariants:
- What the tree keeps is as it was when the controller took it: the same values, on the same side, on both tiers.
- What the copy is given pairs the same host and device pages, on the side where the copy reads its lists.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.targets.engines.calls import fitted
from kvcheck.core.targets.engines.guard import CannotDrive
from kvcheck.core.targets.engines.probe import Rig
from kvcheck.core.targets.engines.streams import SideStream

LAYERS, HOST_SLOTS = 2, 64
DEVICE, HOST = "meta", "cpu"
KERNEL, DIRECT, STAGED = ("kernel", "layer_first"), ("direct", "layer_first"), ("direct", "page_first_direct")
"""Ways of a copy: how it is made, and the layout of the host's memory."""
SIDE = "mamba"


class IndexMoves:
    """write and load, of the hybrid controller and of the tree over the plain one."""

    def needs(self, subject: str) -> tuple[str, ...]:
        """The controller, and what holds its lists."""
        if subject.startswith("tree"):
            return ("hicache.controller", "hicache.tree", "hicache.node", "layers.counter")
        return ("hicache.hybrid", "hicache.transfer", "hicache.pool-name", "layers.counter")

    def control(self, rig: Rig) -> None:
        """A copy that needs no list moved."""
        scene = Scene(rig, STAGED)
        scene.run(1, f"by {' '.join(STAGED)}")

    def measure(self, rig: Rig) -> None:
        """A copy that needs its lists on the device, or in another order."""
        way = KERNEL if rig.subject.endswith("kernel") else DIRECT
        scene = Scene(rig, way)
        scene.run(1 + rig.schedule % 2, f"by {' '.join(way)}")


@dataclass(slots=True)
class Kept:
    """A list that the tree keeps. copy: its values when it was given out; None where it has no memory."""

    what: str
    name: str
    tier: str
    read: Callable[[], torch.Tensor | None]
    side: str
    copy: torch.Tensor | None


@dataclass(slots=True)
class Scene:
    """A controller over pools that hand out ids and record what a copy is given."""

    rig: Rig
    way: tuple[str, str]
    kept: list[Kept] = field(default_factory=list)
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    issued: list[torch.Tensor] = field(default_factory=list)

    def run(self, nodes: int, how: str) -> None:
        """So many nodes backed up, evicted from the device, and loaded again."""
        if self.rig.subject.startswith("tree"):
            _tree(self, nodes, how)
        else:
            _hybrid(self, nodes, how)
        self.rig.judge.count("requests", nodes)
        self.rig.judge.count("backups", nodes)
        self.rig.judge.count("loads", nodes)

    @property
    def device(self) -> str:
        """Where lists of device pages lie."""
        return DEVICE if self.way == KERNEL else HOST

    def ids(self, count: int, side: str) -> torch.Tensor:
        """Ids in an order that no sort leaves alone."""
        drawn = list(range(HOST_SLOTS))
        picked = [drawn.pop(self.rig.mix.below(len(drawn))) for _ in range(count)]
        if count > 1 and picked == sorted(picked):
            picked.reverse()
        self.issued.append(torch.tensor(picked, dtype=torch.int64))
        return self.issued[-1].to(side, copy=True)

    def keep(
        self, what: str, name: str, tier: str, read: Callable[[], torch.Tensor | None], was: torch.Tensor | None = None
    ) -> None:
        """From now on this list may not change, nor have changed since it was given out with these values."""
        value = read()
        if value is None:
            raise CannotDrive(f"{what}: no list of {tier} pages where the release has kept one")
        side = HOST if tier == "host" else self.device
        copy = (value if was is None else was).clone() if side == HOST else None
        self.kept.append(Kept(what, name, tier, read, side, copy))

    def check(self, how: str) -> None:
        """Every list that is kept is as it was, and on its side."""
        judge = self.rig.judge
        for kept in self.kept:
            value = kept.read()
            what = f"{how}: {kept.name} of {kept.what}, {kept.tier} pages"
            judge.reads += 1
            if value is None or value.device.type != kept.side:
                where = "nowhere" if value is None else f"on {_side(value)}"
                text = f"{what}: the list that the tree keeps is {where}, expected it on {_named(kept.side)}"
                judge.find("KV302", "contract", text, tier=kept.tier, lane=kept.name)
                continue
            name = f"{kept.tier}_indices"
            judge.words[name] = judge.words.get(name, 0) + len(value)
            if kept.copy is not None and not torch.equal(value, kept.copy):
                text = f"{what}: was {kept.copy.tolist()} when it was given out, is {value.tolist()}"
                judge.find("KV303", "contract", text, tier=kept.tier, lane=kept.name)

    def check_given(self, how: str) -> None:
        """The copy was given the same pairs, on the side where it reads them."""
        judge = self.rig.judge
        side = self.device
        for host, device in self.given:
            for tier, value in (("host", host), ("device", device)):
                if value.device.type != side:
                    text = f"{how}: the copy is given {tier} pages on {_side(value)}, and reads them on {_named(side)}"
                    judge.find("KV302", "contract", text, tier=tier, lane="copy")
        if side == HOST:
            wanted = sorted(pair for pages in self.pairs for pair in _pairs(*pages))
            seen = sorted({pair for pages in self.given for pair in _pairs(*pages)})
            judge.words["pairs"] = judge.words.get("pairs", 0) + len(seen)
            if seen != sorted(set(wanted)):
                text = f"{how}: the copy pairs pages {seen}, expected {wanted}"
                judge.find("KV301", "contract", text, lane="pairs")
        if not self.given:
            raise CannotDrive(f"{how}: no copy was asked for")
        self.given, self.pairs = [], []

    def controller(self, name: str) -> Any:
        """A controller made without its start-up."""
        names = self.rig.names
        own = self._pools()
        counter = fitted(names["layers.counter"], {"num_layers": LAYERS})
        own |= {
            "io_backend": self.way[0],
            "device": self.device,
            "write_queue": [],
            "load_queue": [],
            "ack_write_queue": [],
            "ack_load_queue": [],
            "layer_num": LAYERS,
            "transfer_layer_id_max": LAYERS,
            "layer_done_counter": counter,
            "write_stream": SideStream(),
            "load_stream": SideStream(),
            "write_fence_stream": None,
            "load_fence_stream": None,
            "has_draft": False,
            "is_kv_sharded": False,
            "l2_transfer_engine": SimpleNamespace(submit_device_to_host=_submitted, submit_host_to_device=_submitted),
            "_l2_transfers": self._take,
            "_l2_load_transfers": self._take,
            "_num_tokens_by_pool": lambda _: {},
            "_transfer_num_bytes": lambda _: 0,
        }
        made = object.__new__(names[name])
        for key, value in own.items():
            setattr(made, key, value)
        return made

    def _pools(self) -> dict[str, Any]:
        """Pools of both tiers, which hand out ids and record what a copy is given."""
        host = SimpleNamespace(
            alloc=lambda count, *_, **__: self.ids(count, HOST),
            free=lambda _: None,
            layout=self.way[1],
            can_use_write_back_jit=False,
            supports_per_pool_backup_indices=False,
            size_per_token=1,
            backup_from_device_all_layer=lambda _, host, device, *__, pool_transfers=None: self._take(
                host, device, pool_transfers
            ),
            load_to_device_per_layer=lambda _, host, device, *__, pool_transfers=None: self._take(
                host, device, pool_transfers
            ),
        )
        device = SimpleNamespace(
            alloc=lambda count: self.ids(count, self.device),
            free=lambda _: None,
            set_hicache_transfer_done_event=lambda *_: None,
        )
        entry = SimpleNamespace(
            host_pool=host,
            device_pool=device,
            share_indices_with_anchor=False,
            host_evict_fn=None,
            device_evict_fn=None,
            device_alloc_fn=None,
            device_free_fn=None,
        )
        host.entry_map = {getattr(self._pool_name(), "value", SIDE): entry, self._pool_name(): entry}
        host.anchor_entry = entry
        host.resolve_host_transfers = self._resolve
        return {"mem_pool_host": host, "mem_pool_device": device, "mem_pool_device_allocator": device}

    def _pool_name(self) -> Any:
        names = self.rig.names
        return names["hicache.pool-name"].MAMBA if names.has("hicache.pool-name") else SIDE

    def _resolve(self, pools: Any, **_: object) -> Any:
        """Host pages for what has none, as a group of host pools gives them out."""
        for pool in pools or []:
            if pool.host_indices is None:
                pool.host_indices = self.ids(len(pool.device_indices), HOST)
        return pools

    def _take(self, host: torch.Tensor, device: torch.Tensor, pools: Any = None) -> list[Any]:
        """What a copy is given."""
        self.given.append((host, device))
        self.given += [(pool.host_indices, pool.device_indices) for pool in pools or []]
        return []


def _hybrid(scene: Scene, nodes: int, how: str) -> None:
    """Backup and load with a side pool, as a tree of hybrid models asks for them."""
    names, rig = scene.rig.names, scene.rig
    controller = scene.controller("hicache.hybrid")
    transfer = names["hicache.transfer"]
    held: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for at in range(nodes):
        value, side = scene.ids(3, scene.device), scene.ids(2, scene.device)
        extra = transfer(name=scene._pool_name(), device_indices=side)
        host = rig.measured(partial(controller.write, value, node_id=at, extra_pools=[extra]), "write")
        was_value, was_side, was_host, was_side_host = scene.issued[-4:]
        node = SimpleNamespace(value=value, host_value=host, side_host=extra.host_indices, extra=extra)
        what = f"node {at} backed up {how}"
        scene.keep(what, "value", "device", _reader(node, "value"), was_value)
        scene.keep(what, "host_value", "host", _reader(node, "host_value"), was_host)
        scene.keep(what, "side host_value", "host", _reader(node, "extra.host_indices"), was_side_host)
        scene.keep(what, "side value", "device", _reader(node, "extra.device_indices"), was_side)
        scene.check("write")
        scene.pairs += [(was_host, was_value), (was_side_host, was_side)]
        scene.check_given("write")
        held.append((node, was_host, was_side_host))
    scene.kept.clear()
    for at, (node, was_host, was_side_host) in enumerate(held):
        extra = transfer(name=scene._pool_name(), host_indices=node.side_host)
        pages = rig.measured(partial(controller.load, node.host_value, node_id=at, extra_pools=[extra]), "load")
        was_pages, was_side = scene.issued[-2:]
        what = f"node {at} loaded {how}"
        scene.keep(what, "host_value", "host", _reader(node, "host_value"), was_host)
        scene.keep(what, "side host_value", "host", _reader(node, "side_host"), was_side_host)
        scene.keep(what, "side transfer", "host", _reader(extra, "host_indices"), was_side_host)
        scene.keep(what, "side value", "device", _reader(extra, "device_indices"), was_side)
        scene.keep(what, "value", "device", _reader(SimpleNamespace(pages=pages), "pages"), was_pages)
        scene.pairs += [(was_host, was_pages), (was_side_host, was_side)]
    rig.measured(controller.start_loading, "start_loading")
    scene.check("load")
    scene.check_given("load")


def _tree(scene: Scene, nodes: int, how: str) -> None:
    """write_backup and load_back of the tree, over a chain of nodes."""
    names, rig = scene.rig.names, scene.rig
    tree = object.__new__(names["hicache.tree"])
    node_type = names["hicache.node"]
    root = node_type()
    root.value, root.host_value, root.key = scene.ids(1, scene.device), scene.ids(1, HOST), []
    own = {
        "cache_controller": scene.controller("hicache.controller"),
        "root_node": root,
        "ongoing_write_through": {},
        "ongoing_load_back": {},
        "load_back_threshold": 0,
        "evictable_size_": 0,
        "metrics_collector": None,
        "inc_lock_ref": lambda _: _Delta(),
        "dec_lock_ref": lambda _: _Delta(),
        "_record_store_event": lambda *_, **__: None,
        "_get_extra_pools": dict,
    }
    for key, value in own.items():
        setattr(tree, key, value)
    chain: list[Any] = []
    hosts: list[torch.Tensor] = []
    for at in range(nodes):
        node = node_type()
        node.parent, node.key, node.value = (chain[-1] if chain else root), [at] * 3, scene.ids(3, scene.device)
        rig.measured(partial(tree.write_backup, node), "write_backup")
        was, was_host = scene.issued[-2:]
        what = f"node {at} backed up {how}"
        scene.keep(what, "value", "device", _reader(node, "value"), was)
        scene.keep(what, "host_value", "host", _reader(node, "host_value"), was_host)
        scene.check("write_backup")
        scene.pairs.append((was_host, was))
        scene.check_given("write_backup")
        chain.append(node)
        hosts.append(was_host)
    scene.kept = [kept for kept in scene.kept if kept.tier == "host"]
    for node in chain:
        node.value = None
    rig.measured(lambda: tree.load_back(chain[-1]), "load_back")
    for at, (node, was_host, was) in enumerate(zip(chain, hosts, scene.issued[-1].view(nodes, 3), strict=True)):
        scene.keep(f"node {at} loaded {how}", "value", "device", _reader(node, "value"), was)
        scene.pairs.append((was_host, was))
    rig.measured(tree.cache_controller.start_loading, "start_loading")
    scene.check("load_back")
    scene.check_given("load_back")


class _Delta(int):
    """What locking a node frees: a number, or an object that has it."""

    delta = 0


def _reader(holder: Any, name: str) -> Callable[[], torch.Tensor | None]:
    """Read an attribute, which may be one of an attribute, each time anew."""
    return lambda: operator.attrgetter(name)(holder)


def _submitted(*_: object, on_layer_done: Any = None, **__: object) -> SimpleNamespace:
    """A copy that is done."""
    for layer in range(LAYERS if on_layer_done else 0):
        on_layer_done(layer)
    return SimpleNamespace(start_event=None, finish_event=None, timing_enabled=False)


def _pairs(host: torch.Tensor, device: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(host.tolist(), device.tolist(), strict=True))


def _side(value: torch.Tensor) -> str:
    return _named(value.device.type)


def _named(side: str) -> str:
    return "the device" if side == DEVICE else "the host"
