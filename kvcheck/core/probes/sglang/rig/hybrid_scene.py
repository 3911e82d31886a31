"""HybridScene: calls the hybrid controller with lists of pages and states, as a tree of hybrid models does.

The group of host pools is the release's own. Its pools are stand-ins that allocate ids and record the lists of a copy.

Invariants:
- The tree's lists do not change after the controller has received them: same values, same side, on both tiers.
- The copy's lists pair the same host and device pages, and lie on the side that the copy requires, if any.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.device import DEVICE, HOST, on_host, side
from kvcheck.core.probes.frame.guard import CannotDrive, fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.streams import SideStream
from kvcheck.core.probes.sglang.rig.bare_manager import bare
from kvcheck.core.probes.sglang.rig.byte_copies import reads_lists_on

LAYERS, HOST_SLOTS = 2, 64
SIDES = {"device": DEVICE, "host": HOST}
STAGED_BACKUPS = ((False, False), (True, True), (True, False), (False, True))
"""Whether backups of pages, and of states, are staged page by page: these copies read host ids on the host as well."""
POLICIES = ("write_through", "write_back", "write_through_selective")


@dataclass(frozen=True, slots=True)
class GivenLists:
    """Lists of a copy. is_staged: it can read the host ids on either side."""

    host: torch.Tensor
    device: torch.Tensor
    is_staged: bool


@dataclass(slots=True)
class KeptList:
    """A list of the tree. copy: its values when it was allocated."""

    what: str
    name: str
    tier: str
    read: Callable[[], torch.Tensor | None]
    side: str
    copy: torch.Tensor


@dataclass(slots=True)
class HybridScene:
    """staged: one of STAGED_BACKUPS: whether the way of copying, and each pool of the group, may be staged."""

    rig: Rig
    way: tuple[str, str]
    staged: tuple[bool, bool] = STAGED_BACKUPS[0]
    policy: str = POLICIES[0]
    kept: list[KeptList] = field(default_factory=list)
    given: list[GivenLists] = field(default_factory=list)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    issued: list[torch.Tensor] = field(default_factory=list)

    def run(self, nodes: int, how: str) -> None:
        _hybrid(self, nodes, how)
        self.rig.judge.count("requests", nodes)
        self.rig.judge.count("backups", nodes)
        self.rig.judge.count("loads", nodes)

    def plain(self) -> None:
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
        """Allocate ids in an order that every sort changes."""
        drawn = list(range(HOST_SLOTS))
        picked = [drawn.pop(self.rig.mix.below(len(drawn))) for _ in range(count)]
        if count > 1 and picked == sorted(picked):
            picked.reverse()
        self.issued.append(torch.tensor(picked, dtype=torch.int64))
        return self.issued[-1].to(side, copy=True)

    def keep(
        self, what: str, name: str, tier: str, read: Callable[[], torch.Tensor | None], was: torch.Tensor | None = None
    ) -> None:
        value = read()
        if value is None:
            raise CannotDrive(f"{what}: no list of {tier} pages where the release has kept one")
        self.kept.append(KeptList(what, name, tier, read, SIDES[tier], on_host(value if was is None else was)))

    def check(self, how: str) -> None:
        judge = self.rig.judge
        for kept in self.kept:
            value = kept.read()
            what = f"{how}: {kept.name} of {kept.what}, {kept.tier} pages"
            judge.reads += 1
            if value is None or value.device.type != kept.side:
                where = "nowhere" if value is None else f"on {side(value)}"
                text = f"{what}: the list that the tree keeps is {where}, expected it on the {kept.tier}"
                judge.find("KV302", "contract", text, tier=kept.tier, lane=kept.name, minimal=self.rig.maker(value))
                continue
            name = f"{kept.tier}_indices"
            judge.words[name] = judge.words.get(name, 0) + len(value)
            if not torch.equal(on_host(value), kept.copy):
                text = f"{what}: was {kept.copy.tolist()} when it was given out, is {on_host(value).tolist()}"
                judge.find("KV303", "contract", text, tier=kept.tier, lane=kept.name, minimal=self.rig.maker(value))

    def check_given(self, how: str) -> None:
        judge = self.rig.judge
        reads = reads_lists_on(self.way[0], DEVICE)
        for given in self.given:
            for tier, value in (("host", given.host), ("device", given.device)):
                is_taken = tier == "host" and given.is_staged
                if value.device.type != (reads or value.device.type) and not is_taken:
                    text = f"{how}: the copy is given {tier} pages on {side(value)}, and reads them on the device"
                    judge.find("KV302", "contract", text, tier=tier, lane="copy")
        wanted = sorted({pair for pages in self.pairs for pair in _pairs(*pages)})
        seen = sorted({pair for given in self.given for pair in _pairs(given.host, given.device)})
        judge.words["pairs"] = judge.words.get("pairs", 0) + len(seen)
        if seen != wanted:
            text = f"{how}: the copy pairs pages {seen}, expected {wanted}"
            judge.find("KV301", "contract", text, lane="pairs")
        if not self.given:
            raise CannotDrive(f"{how}: no copy was asked for")
        self.given, self.pairs = [], []

    def controller(self, name: str) -> Any:
        names = self.rig.names
        own = self._pools()
        counter = fitted(names["layers.counter"], {"num_layers": LAYERS})
        own |= {
            "io_backend": self.way[0],
            "write_policy": self.policy,
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
            "host_memory_mode": "cache",
            "l2_transfer_engine": SimpleNamespace(
                submit_device_to_host=partial(self._submitted, True),
                submit_host_to_device=partial(self._submitted, False),
            ),
            "_num_tokens_by_pool": lambda _: {},
            "_transfer_num_bytes": lambda _: 0,
        }
        return bare(names[name], own)

    def _pools(self) -> dict[str, Any]:
        group = self._group(self.staged)
        if self.staged != (False, False) and not hasattr(group, "can_use_write_back_jit"):
            group = self._group((False, False))  # a release without staged backups
        elif len({*self.staged}) > 1 and not getattr(group, "supports_per_pool_backup_indices", False):
            group = self._group((False, False))  # a release in which either all pools are staged or none
        device = SimpleNamespace(
            alloc=lambda count: self.ids(count, DEVICE),
            free=lambda _: None,
            set_hicache_transfer_done_event=lambda *_: None,
        )
        return {"mem_pool_host": group, "mem_pool_device": device, "mem_pool_device_allocator": device}

    def _group(self, staged: tuple[bool, bool]) -> Any:
        names = self.rig.names
        known = names["hicache.pool-name"]
        entries = [
            fitted(
                names["hicache.host-entry"],
                {
                    "name": name,
                    "host_pool": self._host_pool(is_staged and self.way == ("kernel", "page_first")),
                    "device_pool": SimpleNamespace(
                        alloc=lambda count: self.ids(count, DEVICE), free=lambda _: None, host_transfer_translate=None
                    ),
                    "layer_mapper": lambda layer: layer,
                    "is_primary_index_anchor": name is known.KV,
                },
            )
            for name, is_staged in zip((known.KV, known.MAMBA), staged, strict=True)
        ]
        return fitted(names["hicache.host-group"], {"entries": entries})

    def _host_pool(self, is_staged: bool) -> SimpleNamespace:
        return SimpleNamespace(
            alloc=lambda count, *_, **__: self.ids(count, HOST),
            free=lambda ids: len(ids),
            layout=self.way[1],
            page_size=1,
            device=HOST,
            size=HOST_SLOTS,
            logical_size=HOST_SLOTS,
            size_per_token=1,
            can_use_write_back_jit=is_staged,
            backup_from_device_all_layer=lambda _, host, device, *__: self._take(host, device, is_staged),
            load_to_device_per_layer=lambda _, host, device, *__: self._take(host, device, False),
        )

    def _submitted(
        self, is_backup: bool, transfers: Any, *_: object, on_layer_done: Any = None, **__: object
    ) -> SimpleNamespace:
        for each in transfers:
            is_staged = is_backup and each.host_pool.can_use_write_back_jit
            self._take(each.host_indices, each.device_indices, is_staged)
        for layer in range(LAYERS if on_layer_done else 0):
            on_layer_done(layer)
        return SimpleNamespace(start_event=None, finish_event=None, timing_enabled=False)

    def _take(self, host: torch.Tensor, device: torch.Tensor, is_staged: bool) -> None:
        self.rig.record()
        self.given.append(GivenLists(host, device, is_staged))


def _hybrid(scene: HybridScene, nodes: int, how: str) -> None:
    names, rig = scene.rig.names, scene.rig
    controller = scene.controller("hicache.hybrid")
    transfer = names["hicache.transfer"]
    held: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for at in range(nodes):
        value, states = scene.ids(3, DEVICE), scene.ids(2, DEVICE)
        extra = transfer(name=names["hicache.pool-name"].MAMBA, device_indices=states)
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
        extra = transfer(name=names["hicache.pool-name"].MAMBA, host_indices=node.side_host)
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
    return lambda: operator.attrgetter(name)(holder)


def _pairs(host: torch.Tensor, device: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(on_host(host).tolist(), on_host(device).tolist(), strict=False))
