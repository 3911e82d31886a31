"""Probe index-moves: lists of page ids that are moved for a copy, while the prefix tree keeps the same lists.

Tensors without memory stand for tensors on the device, so that a list that lies on the wrong side shows; where both
sides lie in memory, every value is compared. Copies themselves are not made.

Invariants:
- What the tree keeps is as it was when the controller took it: the same values, on the same side, on both tiers.
- What the copy is given pairs the same host and device pages, on the side where the copy reads its lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A list that the tree keeps. copy: its values when it was handed over; None where it has no memory."""

    what: str
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
        return torch.tensor(picked, dtype=torch.int64).to(side)

    def keep(self, what: str, tier: str, read: Callable[[], torch.Tensor | None]) -> None:
        """From now on this list may not change."""
        value = read()
        if value is None:
            raise CannotDrive(f"{what}: no list of {tier} pages where the release has kept one")
        side = HOST if tier == "host" else self.device
        copy = value.clone() if value.device.type == HOST else None
        self.kept.append(Kept(what, tier, read, side, copy))

    def check(self, how: str) -> None:
        """Every list that is kept is as it was, and on its side."""
        judge = self.rig.judge
        for kept in self.kept:
            value = kept.read()
            what = f"{how}: {kept.what}, {kept.tier} pages"
            judge.reads += 1
            if value is None or value.device.type != kept.side:
                where = "nowhere" if value is None else f"on {_side(value)}"
                text = f"{what}: the list that the tree keeps is {where}, expected it on {_named(kept.side)}"
                judge.find("KV302", "contract", text, tier=kept.tier, lane=kept.what)
                continue
            name = f"{kept.tier}_indices"
            judge.words[name] = judge.words.get(name, 0) + len(value)
            if kept.copy is not None and not torch.equal(value, kept.copy):
                text = f"{what}: was {kept.copy.tolist()} when it was handed over, is {value.tolist()}"
                judge.find("KV303", "contract", text, tier=kept.tier, lane=kept.what)

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
    held: list[tuple[Any, Any]] = []
    for at in range(nodes):
        value, side = scene.ids(3, scene.device), scene.ids(2, scene.device)
        extra = transfer(name=scene._pool_name(), device_indices=side)
        host = rig.measured(lambda: controller.write(value, node_id=at, extra_pools=[extra]), "write")
        what = f"node {at} backed up {how}"
        node = SimpleNamespace(value=value, host_value=host, extra=extra, side_host=extra.host_indices)
        for name, tier in (("value", "device"), ("host_value", "host"), ("side_host", "host")):
            scene.keep(f"{what}, {name}", tier, lambda node=node, name=name: getattr(node, name))  # type: ignore[misc]
        scene.keep(f"{what}, side device", "device", lambda extra=extra: extra.device_indices)  # type: ignore[misc]
        scene.check("write")
        scene.pairs += [(host, value), (node.side_host, side)]
        scene.check_given("write")
        held.append((node, extra))
    scene.kept.clear()
    for at, (node, _) in enumerate(held):
        extra = transfer(name=scene._pool_name(), host_indices=node.side_host)
        pages = rig.measured(lambda: controller.load(node.host_value, node_id=at, extra_pools=[extra]), "load")
        what = f"node {at} loaded {how}"
        for name in ("host_value", "side_host"):
            scene.keep(f"{what}, {name}", "host", lambda node=node, name=name: getattr(node, name))  # type: ignore[misc]
        scene.keep(f"{what}, side host", "host", lambda extra=extra: extra.host_indices)  # type: ignore[misc]
        scene.keep(f"{what}, side device", "device", lambda extra=extra: extra.device_indices)  # type: ignore[misc]
        scene.keep(f"{what}, pages", "device", lambda pages=pages: pages)  # type: ignore[misc]
        scene.pairs += [(node.host_value, pages), (node.side_host, extra.device_indices)]
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
    for at in range(nodes):
        node = node_type()
        node.parent, node.key, node.value = (chain[-1] if chain else root), [at] * 3, scene.ids(3, scene.device)
        scene.keep(f"node {at} backed up {how}", "device", lambda node=node: node.value)  # type: ignore[misc]
        rig.measured(lambda: tree.write_backup(node), "write_backup")
        scene.keep(f"node {at} backed up {how}", "host", lambda node=node: node.host_value)  # type: ignore[misc]
        scene.check("write_backup")
        scene.pairs.append((node.host_value, node.value))
        scene.check_given("write_backup")
        chain.append(node)
    scene.kept = [kept for kept in scene.kept if kept.tier == "host"]
    for node in chain:
        node.value = None
    rig.measured(lambda: tree.load_back(chain[-1]), "load_back")
    for at, node in enumerate(chain):
        scene.keep(f"node {at} loaded {how}", "device", lambda node=node: node.value)  # type: ignore[misc]
        scene.pairs.append((node.host_value, node.value))
    rig.measured(tree.cache_controller.start_loading, "start_loading")
    scene.check("load_back")
    scene.check_given("load_back")


class _Delta(int):
    """What locking a node frees: a number, or an object that has it."""

    delta = 0


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
