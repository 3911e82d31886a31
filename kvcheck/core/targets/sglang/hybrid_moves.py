"""Lists given to the hybrid controller, called as a tree of hybrid models calls it: pages, and a side pool's states.

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
from kvcheck.core.targets.engines.device import DEVICE, HOST, on_host, side
from kvcheck.core.targets.engines.guard import CannotDrive
from kvcheck.core.targets.engines.probe import Rig
from kvcheck.core.targets.engines.streams import SideStream

LAYERS, HOST_SLOTS = 2, 64
SIDE = "mamba"
SIDES = {"device": DEVICE, "host": HOST}


@dataclass(slots=True)
class Kept:
    """A list that the tree keeps. copy: its values when it was given out."""

    what: str
    name: str
    tier: str
    read: Callable[[], torch.Tensor | None]
    side: str
    copy: torch.Tensor


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
        _hybrid(self, nodes, how)
        self.rig.judge.count("requests", nodes)
        self.rig.judge.count("backups", nodes)
        self.rig.judge.count("loads", nodes)

    def plain(self) -> None:
        """A page alone, with no side pool: there is nothing to reorder and nothing that anybody keeps."""
        controller, rig = self.controller("hicache.hybrid"), self.rig
        host = rig.measured(partial(controller.write, self.ids(1, DEVICE), node_id=0), "write")
        value, was_host = self.issued[-2:]
        self.pairs.append((was_host, value))
        self.check_given("write")
        rig.measured(partial(controller.load, host, node_id=0), "load")
        self.pairs.append((was_host, self.issued[-1]))
        rig.measured(controller.start_loading, "start_loading")
        self.check_given("load")

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
        self.kept.append(Kept(what, name, tier, read, SIDES[tier], on_host(value if was is None else was)))

    def check(self, how: str) -> None:
        """Every list that is kept is as it was, and on its side."""
        judge = self.rig.judge
        for kept in self.kept:
            value = kept.read()
            what = f"{how}: {kept.name} of {kept.what}, {kept.tier} pages"
            judge.reads += 1
            if value is None or value.device.type != kept.side:
                where = "nowhere" if value is None else f"on {side(value)}"
                text = f"{what}: the list that the tree keeps is {where}, expected it on the {kept.tier}"
                judge.find("KV302", "contract", text, tier=kept.tier, lane=kept.name)
                continue
            name = f"{kept.tier}_indices"
            judge.words[name] = judge.words.get(name, 0) + len(value)
            if not torch.equal(on_host(value), kept.copy):
                text = f"{what}: was {kept.copy.tolist()} when it was given out, is {on_host(value).tolist()}"
                judge.find("KV303", "contract", text, tier=kept.tier, lane=kept.name)

    def check_given(self, how: str) -> None:
        """The copy was given the same pairs, on the side where it reads them."""
        judge = self.rig.judge
        reads = DEVICE if self.way[0] == "kernel" else HOST
        for host, device in self.given:
            for tier, value in (("host", host), ("device", device)):
                if value.device.type != reads:
                    where = "the device" if reads == DEVICE else "the host"
                    text = f"{how}: the copy is given {tier} pages on {side(value)}, and reads them on {where}"
                    judge.find("KV302", "contract", text, tier=tier, lane="copy")
        wanted = sorted({pair for pages in self.pairs for pair in _pairs(*pages)})
        seen = sorted({pair for pages in self.given for pair in _pairs(*pages)})
        judge.words["pairs"] = judge.words.get("pairs", 0) + len(seen)
        if seen != wanted:
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
            "device": DEVICE,
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
            alloc=lambda count: self.ids(count, DEVICE),
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
        value, states = scene.ids(3, DEVICE), scene.ids(2, DEVICE)
        extra = transfer(name=scene._pool_name(), device_indices=states)
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


def _reader(holder: Any, name: str) -> Callable[[], torch.Tensor | None]:
    """Read an attribute, which may be one of an attribute, each time anew."""
    return lambda: operator.attrgetter(name)(holder)


def _submitted(*_: object, on_layer_done: Any = None, **__: object) -> SimpleNamespace:
    """A copy that is done."""
    for layer in range(LAYERS if on_layer_done else 0):
        on_layer_done(layer)
    return SimpleNamespace(start_event=None, finish_event=None, timing_enabled=False)


def _pairs(host: torch.Tensor, device: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(on_host(host).tolist(), on_host(device).tolist(), strict=False))
